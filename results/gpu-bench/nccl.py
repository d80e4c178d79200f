"""Three processes over NCCL against one process: the same weights?

    python results/gpu-bench/nccl.py [--method replay] [--out FOLDER]

NCCL refuses two processes on one GPU of a host, so on one GPU each poses as a host of its own (NCCL_HOSTID), started by
its own `torchrun`: what crosses an interface goes over NCCL's transport between hosts. A check of weights alone.
"""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from parlay.run import records

HERE = Path(__file__).parent
PATIENCE = 60  # seconds
STAGES, EPOCHS, SAMPLES, BATCH = 3, 5, 1024, 128
TRAIN = (
    f"train --dataset synthetic --synthetic-samples {SAMPLES} --model resnet20 --stages {STAGES} --epochs {EPOCHS} "
    f"--batch-size {BATCH} --precision float32 --capture off --schedule alternate:2:1 --device cuda --lr 0.01 "
    "--serial-phase sequential --checkpoint-every 0"
)
HOST = f"--nnodes {STAGES} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29517"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=HERE)
    ask.add_argument("--method", default="al")
    given = ask.parse_args()
    out, name = given.out, "nccl" if given.method == "al" else f"nccl-{given.method}"
    train = f"{TRAIN} --method {given.method}"
    alone = f"-m parlay.cli {train.replace('sequential', 'auto')} --engine in-process"
    ended([python(f"{alone} --out {out / f'{name}-one-process'}", {})], out)
    hosts = [f"-m torch.distributed.run {HOST} --node-rank {n} -m parlay.cli {train}" for n in range(STAGES)]
    names = [
        {"NCCL_HOSTID": f"host-{n}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"} for n in range(STAGES)
    ]
    ended([python(f"{host} --out {out / name}", own) for host, own in zip(hosts, names, strict=True)], out)
    one, three = (load_file(out / run / "model.safetensors") for run in (f"{name}-one-process", name))
    difference = torch.cat([(one[key].float() - three[key].float()).flatten() for key in one])
    whole = torch.cat([value.float().flatten() for value in one.values()])
    told = {
        "processes": STAGES,
        "method": given.method,
        "relative_difference": float(difference.norm() / whole.norm()),
        "steps": EPOCHS * SAMPLES // BATCH,
        "environment": records.environment([torch.cuda.get_device_name()]),
        "commands": [
            f"NVIDIA_TF32_OVERRIDE=0 python {alone}",
            *(f"NVIDIA_TF32_OVERRIDE=0 NCCL_HOSTID=host-{n} python {host}" for n, host in enumerate(hosts)),
        ],
    }
    records.write_json(out / f"{name}.json", told)
    print(
        f"{given.method}, three processes over NCCL: relative difference {told['relative_difference']:.1e}", flush=True
    )


def python(words: str, names: dict[str, str]) -> subprocess.Popen[bytes]:
    """NVIDIA_TF32_OVERRIDE: products of float32 are not rounded to fewer digits, which both would do otherwise."""
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0", "OMP_NUM_THREADS": "2", **names}
    return subprocess.Popen(
        [sys.executable, *shlex.split(words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(processes: list[subprocess.Popen[bytes]], out: Path) -> None:
    logs = []
    for process in processes:
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        logs.append(said.decode(errors="replace"))
    (out / "nccl.log").write_text("\n".join(logs))
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(log[-1500:] for log in logs))


if __name__ == "__main__":
    main()
