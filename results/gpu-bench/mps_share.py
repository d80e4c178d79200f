"""Are gradients right on a share of a GPU's multiprocessors (MPS)? Plain PyTorch, no engine of Parlay.

    nvidia-cuda-mps-control -d
    python results/gpu-bench/mps_share.py                                          # under the daemon, all of the GPU
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=60 python results/gpu-bench/mps_share.py     # a share

Both print the same numbers where they are. One line for every way to compute and batch size: loss, norm of the
gradient, and the first weights whose gradient is not finite.
"""

import argparse

import torch

from parlay import models

WAYS = {"plain": {}, "benchmark": {"benchmark": True}, "no cudnn": {"enabled": False}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="wrn-40-10")
    model = parser.parse_args().model
    for name, flags in WAYS.items():
        torch.manual_seed(0)
        net = models.build(model, (3, 32, 32), 100).to("cuda", memory_format=torch.channels_last).train()
        for samples in (128, 80, 64, 40):
            x = torch.randn(samples, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
            y = torch.randint(0, 100, (samples,), device="cuda")
            net.zero_grad(set_to_none=True)
            with torch.backends.cudnn.flags(**{"enabled": True, "benchmark": False, **flags}):
                with torch.autocast("cuda", torch.bfloat16):
                    out = net(x)
                loss = torch.nn.functional.cross_entropy(out.float(), y)
                loss.backward()
            gradients = {key: weight.grad for key, weight in net.named_parameters()}
            bad = [key for key, gradient in gradients.items() if not gradient.isfinite().all()]
            norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
            print(name, samples, f"loss {loss.item():.4f} norm {norm:.4f} not finite: {bad[:6]}", flush=True)


main()
