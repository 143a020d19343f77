import json
from pathlib import Path


class LineMonitor:
    name = "my_lines"

    def __init__(self, file):
        self.file, self.waiting = Path(file), []

    def write_events(self, events):
        self.waiting += [json.dumps(list(event)) for event in events]

    def flush(self):
        if self.waiting:
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n".join(self.waiting) + "\n")
            self.waiting = []

    def close(self):
        self.flush()
