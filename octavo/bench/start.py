"""Seconds from the start of `octavo generate` to its first token, beyond those of `import torch`.

python -m octavo.bench.start [MODEL] [REPEATS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time


def seconds(*command: str) -> float:
    """Until the process writes its first byte."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        taken = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"{' '.join(command)} printed nothing, or failed")
    return taken


def main(model: str = "smollm2-135m", repeats: str = "5") -> None:
    generate = ("-m", "octavo", "generate", "The capital of France is", "--model", model, "--max-tokens", "2")
    pairs = [(seconds("-c", "import torch; print(1)"), seconds(*generate)) for _ in range(int(repeats) + 1)][1:]
    beyond = sorted(whole - bare for bare, whole in pairs)
    figures = {
        "import_torch_s": statistics.median(bare for bare, _ in pairs),
        "first_token_s": statistics.median(whole for _, whole in pairs),
        "beyond_import_torch_s": statistics.median(beyond),
        "spread": [beyond[0], beyond[-1]],
    }
    print(json.dumps(figures, default=float, indent=None))


if __name__ == "__main__":
    main(*sys.argv[1:])
