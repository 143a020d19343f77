"""Tables, JSON and errors on a terminal and in a pipe."""

from __future__ import annotations

import os
import sys
from typing import Any

from ds_command_kit.show import other_output_to_stderr, say_error, show_json, show_table


def test_a_table_on_a_terminal_folds_and_loses_nothing(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    long = "".join(chr(ord("a") + i % 26) for i in range(100))
    show_table(("name", "why"), [("[bold]x", long)])
    out = capsys.readouterr().out
    assert "[bold]x" in out
    assert len(out.splitlines()) > 4
    cells = [line.replace("[bold]x", "").strip() for line in out.splitlines()]
    assert "".join(cell for cell in cells if cell.isalpha()) == long


def test_in_a_pipe_every_row_is_one_whole_line(capsys: Any) -> None:
    show_table(("name", "why"), [("a", "x" * 300), ("bcd", "two\nlines")])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["name  why", "a     " + "x" * 300, "bcd   two lines"]


def test_json_goes_to_stdout_and_errors_to_stderr(capsys: Any) -> None:
    show_json({"a": ["é"]})
    say_error("no such file")
    out, err = capsys.readouterr()
    assert out == '{\n  "a": [\n    "é"\n  ]\n}\n'
    assert err == "dscore: no such file\n"


def test_what_libraries_print_does_not_stand_in_the_output(capfd: Any) -> None:
    with other_output_to_stderr():
        print("from Python")
        os.write(1, b"from C\n")
    print("the command's own")
    out, err = capfd.readouterr()
    assert out == "the command's own\n"
    assert "from Python" in err and "from C" in err
