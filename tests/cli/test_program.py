"""The program as a process of its own: what it imports, how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
import fake_llm, octavo
octavo.LLM = fake_llm.FakeLLM
from octavo.cli import main
sys.argv[0] = "octavo"
{before}
main()
"""


def octavo(*words, before="", **streams):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", PROGRAM.format(before=before), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **streams)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("generate", "--help"),
        ("config",),
        ("generate", "--temperature", "-1", "hi"),
        ("bench", "memory", "--help"),
        ("advise", "nowhere.json"),
    ],
)
def test_torch_is_not_imported(words):
    code = f"""
import sys
from octavo.cli import main
sys.argv = ["octavo", *{words!r}]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), done.stderr


def test_a_closed_pipe_is_no_fault(tmp_path):
    with octavo("generate", "--model", str(tmp_path), *["many"] * 20_000) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read().endswith(": no memory at all\n")
    assert process.returncode == 1


def test_an_interrupt_while_it_works(tmp_path):
    slow = "fake_llm.FakeLLM.stats = lambda self: (print('now', flush=True), time.sleep(60))"
    with octavo("generate", "--model", str(tmp_path), "hi", before=slow) as process:
        assert "now\n" in iter(process.stdout.readline, "")
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().endswith(": no memory at all\n")
    assert process.returncode == 130


def test_a_fault_of_ours_keeps_its_traceback(tmp_path):
    with octavo("generate", "--model", str(tmp_path), "crash") as process:
        assert process.stderr.read().endswith("RuntimeError: a fault\n")
    assert process.returncode == 1


def test_characters_the_terminal_lacks_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with octavo("generate", "--model", str(tmp_path), "hi") as process:
        assert "s?ven" in process.stdout.read()
        process.stderr.read()
    assert process.returncode == 0
