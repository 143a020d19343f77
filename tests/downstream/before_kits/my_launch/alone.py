import subprocess
import sys


def start(request):
    script = ["-m", request.script] if request.is_module else [request.script]
    return subprocess.run([sys.executable, *script, *request.arguments], check=False).returncode
