"""Compares the loss of examples/tied_gpt.toml after 200 steps with codecs, against none.

benchmarks/codecs/loss.py [--seeds 1] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS, LAST = 4, 20  # the mean of the last steps is less noisy than the last step
CODECS = {
    "none": '"none"',
    "int8": "int8",
    "bf16": "bf16",
    "fp8": "fp8",
    "topk 0.1": '{name="topk", fraction=0.1}',
    "int8, topk 0.1 gradients": '{activations="int8", gradients="topk"}',
    "int8 without feedback": '{name="int8", feedback=false}',
    "fp8 without feedback": '{name="fp8", feedback=false}',
    "topk 0.1 without feedback": '{name="topk", fraction=0.1, feedback=false}',
}


def losses(codecs: str, seed: int, folder: str) -> list[float]:
    """Returns the loss of each step of a run."""
    settings = {
        "parallel.codecs": codecs,
        "train.seed": seed,
        "train.output": f"{folder}/run",
        "train.save": "false",
        "train.reporters": '["jsonl"]',
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["-m", "pipegrad", "train", str(ROOT / "examples" / "tied_gpt.toml")]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    subprocess.run(command, check=True, capture_output=True)
    lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [line["loss"] for line in found if "loss" in line]


def main() -> None:
    """Prints the README's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = dict[str, list[list[float]]]()
    print("| codecs | loss of the last step | by none | mean of the last 20 | by none |")
    print("|---|---|---|---|---|", flush=True)
    for name, codecs in CODECS.items():
        runs = found.setdefault(name, [])
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(losses(codecs, seed, folder))
        cells = [name]
        for last in (1, LAST):
            means = [statistics.mean(run[-last:]) for run in runs]
            bases = [statistics.mean(run[-last:]) for run in found["none"]]
            ratio = statistics.mean(a / b - 1 for a, b in zip(means, bases, strict=True))
            cells += [f"{statistics.mean(means):.4f}", f"{100 * ratio:+.2f} %"]
        print(f"| {' | '.join(cells)} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
