"""The program as a process: broken streams, small character sets, signals, usage."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

from isthmus.cli.text import count, table
from isthmus.methods.registry import METHODS

from ..engine.models import family, recipe

PROGRAM = f"{sys.executable} -m isthmus"


def shell(command, **environment):
    """Run a shell's command line."""
    return subprocess.run(
        ["/bin/sh", "-c", command],
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture
def recipe_file(tmp_path):
    base, *experts = family(tmp_path / "models")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe("ties", experts, base)))
    return path


@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
@pytest.mark.parametrize("arguments", ["methods", "methods ties --json", "--help"])
def test_output_that_cannot_be_written_is_one_message(arguments, stdout):
    shown = shell(f"{PROGRAM} {arguments} {stdout}")
    assert shown.returncode == 1
    assert shown.stderr.startswith(b"error: the output cannot be written: ")
    assert shown.stderr.count(b"\n") == 1


def test_a_closed_stderr_keeps_nothing_from_being_done(recipe_file, tmp_path):
    shown = shell(f"{PROGRAM} merge {recipe_file} {tmp_path / 'out'} 2>&-")
    assert shown.returncode == 0
    assert b"tensors merged" in shown.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_both_streams_broken_end_quietly():
    assert shell(f"{PROGRAM} methods >/dev/full 2>/dev/full").returncode == 1


def test_a_reader_that_leaves_is_no_error():
    shown = shell(f"{PROGRAM} methods | head -c 1")
    assert shown.stderr == b""


def test_characters_that_the_terminal_lacks_become_question_marks():
    shown = shell(f"{PROGRAM} methods dare_ties", PYTHONIOENCODING="latin-1")
    assert shown.returncode == 0
    assert b"the ?1 norm" in shown.stdout


def test_errors_are_json_where_json_is_asked_for(tmp_path):
    for arguments in (
        f"merge {tmp_path}/absent.yaml {tmp_path}/out --json",
        f"inspect {tmp_path}/absent --json",
        "methods tise --json",
        f"verify {tmp_path}/absent --json",
    ):
        shown = shell(f"{PROGRAM} {arguments}")
        assert shown.returncode == 1
        assert json.loads(shown.stdout).keys() == {"error", "cure"}
        assert shown.stderr == b""


SLOW = """
import sys, threading, time
import isthmus.methods.registry as registry
from isthmus.__main__ import run

class Slow(dict):
    def values(self):
        try:
            print("begun", flush=True)
            time.sleep(60)
        finally:
            threading.Thread(target=time.sleep, args=({stopping},)).start()
            print("stopping", flush=True)

registry.METHODS = Slow()
sys.argv = ["isthmus", "methods"]
run()
"""
"""A command that runs until it is stopped; then a thread of it takes its time."""


def start(stopping):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW.replace("{stopping}", str(stopping))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    return process


def test_ctrl_c_is_no_traceback():
    process = start(0)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == ""


def test_a_second_ctrl_c_leaves_at_once():
    process = start(60)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopping\n"
    time.sleep(0.5)  # The interpreter waits for the thread now, and would tell of its end.
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == ""


def test_ctrl_c_while_the_program_loads_is_no_traceback(tmp_path):
    # Stands in for typer, which takes longest to load.
    (tmp_path / "typer.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "isthmus"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert told == ""


def test_an_ignored_ctrl_c_stays_ignored():
    shown = shell(
        "trap '' INT; exec "
        + f"{sys.executable} -c 'import signal; from isthmus.cli.interrupts import listen; listen(); "
        + "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)'"
    )
    assert shown.stdout == b"True\n"


def test_the_installed_program_starts_where_ctrl_c_is_heard():
    from importlib.metadata import entry_points

    (program,) = [p for p in entry_points(group="console_scripts") if p.name == "isthmus"]
    assert program.value == "isthmus.__main__:run"


@pytest.mark.parametrize("arguments", ["-h", "merge -h"])
def test_help_fits_a_terminal(arguments):
    shown = shell(f"{PROGRAM} {arguments}", COLUMNS="80").stdout.decode()
    assert "..." not in shown.partition("\nCommands:")[2]
    assert max(map(len, shown.splitlines())) <= 80


def test_the_example_recipe_of_the_help_is_yaml():
    shown = shell(f"{PROGRAM} merge -h", COLUMNS="80").stdout.decode()
    example = re.search(r"Example recipe:\n(.*?)\n\n", shown, re.DOTALL)[1]
    content = yaml.safe_load(example)
    assert content["merge_method"] == "ties"
    assert len(content["models"]) == 2


def test_resume_and_overwrite_exclude_each_other(recipe_file, tmp_path):
    shown = shell(f"{PROGRAM} merge {recipe_file} {tmp_path / 'out'} --resume --overwrite")
    assert shown.returncode == 2
    assert b"--resume, --overwrite" in shown.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "base", "models"),
    [
        ("slerp", "required", "exactly one, besides base_model"),
        ("ties", "required", "one or more, besides base_model"),
        ("linear", "lends config and tokenizer; counts as a model only when listed", "one or more"),
        (
            "passthrough",
            "lends config and tokenizer; counts as a model only when listed",
            "exactly one",
        ),
    ],
)
def test_methods_say_which_models_they_take(method, base, models):
    assert method in METHODS
    shown = shell(f"{PROGRAM} methods {method}").stdout.decode()
    assert f"\nbase_model: {base}\nmodels: {models}\n" in shown


def test_one_is_not_many():
    assert [count(n, "model") for n in (0, 1, 2, 1000)] == [
        "0 models",
        "1 model",
        "2 models",
        "1,000 models",
    ]


def test_tables_fold_words_and_cut_nothing():
    name = "model.layers.*.self_attn.q_proj" * 3
    lines = table([["module", "n"], [name, "7"]], left=(0,), width=40)
    assert max(map(len, lines)) <= 40
    assert "".join(line.split("  ")[0] for line in lines[2:]) == name
    assert name + "  7" in table([["module", "n"], [name, "7"]], left=(0,), width=None)


@pytest.mark.parametrize(
    ("cell", "folded"),
    [
        ("encoder.layer.*.attention.output", ["encoder.layer.*.", "attention.output"]),
        ("copied: not a floating-point", ["copied: not a", "floating-point"]),
        ("x" * 45, ["x" * 20, "x" * 20, "x" * 5]),
    ],
)
def test_names_are_folded_between_their_parts(cell, folded):
    lines = table([["module", "n"], [cell, "7"]], left=(0,), width=23)
    assert [line[:20].rstrip() for line in lines[2:]] == folded


def test_tables_print_no_control_characters():
    assert "\x1b" not in "".join(table([["a"], ["\x1b[31m"]], left=(0,), width=None))
