"""Train the built-in model. The run is counted in steps: same packages and pins give the same run.

`python train.py PACKAGES WORK` prepares the corpus if WORK has none, trains, keeps a checkpoint in
WORK and ends with the held-out losses; `--resume` goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import prepare
from model import Model
from torch import Tensor

BLOCK = 512  # tokens of the unit that is shuffled; short sequences are halves of it
FINAL_BLOCKS = 128  # per kind of text, for the figures of record
LOSS_ROWS = 256  # rows of logits held at once


@dataclass(frozen=True)
class Settings:
    """Everything that decides the run, apart from corpus, versions and hardware."""

    steps: int = 2200
    long_from: float = 0.85  # share of the steps after which sequences are 512 long, not 256
    blocks_per_step: int = 4
    learning_rate: float = 5e-3
    warmup: int = 40
    hold: float = 0.4  # share of the steps at full rate; then linear to 0
    weight_decay: float = 0.1
    mtp_weights: tuple[float, float, float] = (0.5, 0.15, 0.1)
    seed: int = 1
    threads: int = 2
    checkpoint_every: int = 200


class Losses(torch.autograd.Function):
    """Cross-entropy of the trunk and of each draft step, without ever holding all logits.

    The head is trained on the trunk's distribution (not on the text): a draft is accepted when the
    two agree. Gradients are computed on the way forward, LOSS_ROWS rows at a time.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        weights: tuple[float, ...],
        length: int,
        output: Tensor,
        targets: Tensor,
        hidden: Tensor,
        *steps: Tensor,
    ) -> Tensor:
        """Compute the means.

        Args:
            ctx: keeps the gradients.
            weights: of each draft step's mean in the gradient; the trunk's is 1.
            length: T; row i is position i % T.
            output: [V, D] projection, shared by trunk and head.
            targets: int64 [N], the true next tokens.
            hidden: [N, D] trunk rows.
            steps: per draft step [n, D], n <= N: the rows of the first sequences.

        Returns:
            [1 + number of steps]: the mean cross-entropies, unweighted.
        """
        sums = torch.zeros(1 + len(steps))
        counts = [hidden.shape[0]]
        for n, rows in enumerate(steps):
            # the first n positions of a sequence have no draft step n + 1
            counts.append(rows.shape[0] // length * (length - n))
        d_output = torch.zeros_like(output)
        d_hidden = torch.empty_like(hidden)
        d_steps = [torch.empty_like(rows) for rows in steps]
        for start in range(0, hidden.shape[0], LOSS_ROWS):
            part = slice(start, min(start + LOSS_ROWS, hidden.shape[0]))
            rows, target = hidden[part], targets[part]
            logits = rows @ output.T
            log_sum = logits.logsumexp(-1)
            sums[0] += (log_sum - logits.gather(1, target[:, None])[:, 0]).sum()
            trunk = logits.sub_(log_sum[:, None]).exp_()
            position = torch.arange(part.start, part.stop) % length
            for n, all_rows in enumerate(steps):
                if part.start >= all_rows.shape[0]:
                    break
                rows_n = all_rows[part]
                some = slice(rows_n.shape[0])
                log_head = (rows_n @ output.T).log_softmax(-1)
                valid = (position[some] >= n).float()
                sums[1 + n] -= torch.linalg.vecdot(trunk[some], log_head) @ valid
                valid *= weights[n] / counts[1 + n]
                grad = log_head.exp_().sub_(trunk[some]).mul_(valid[:, None])
                torch.mm(grad, output, out=d_steps[n][part])
                d_output.addmm_(grad.T, rows_n)
            trunk[torch.arange(target.shape[0]), target] -= 1.0
            trunk.mul_(1.0 / counts[0])
            torch.mm(trunk, output, out=d_hidden[part])
            d_output.addmm_(trunk.T, rows)
        ctx.gradients = (d_output, d_hidden, *d_steps)
        return sums / torch.tensor(counts)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple:
        """Hand out the gradient of the weighted sum; only `.sum().backward()` is meaningful."""
        del grad
        d_output, d_hidden, *d_steps = ctx.gradients
        return None, None, d_output, None, d_hidden, *d_steps


def training_losses(model: Model, tokens: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Losses of int64 tokens [B, T + 1]: trunk, then draft steps over all, 1/2, 1/4 of B."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    count, length = inputs.shape
    hidden = model.hidden(inputs)
    sequences = [max(1, count >> n) for n in range(len(weights))]
    steps = model.draft_steps(inputs, hidden, sequences)
    return Losses.apply(
        weights,
        length,
        model.token_embd.weight,
        targets.reshape(-1),
        hidden.flatten(0, 1),
        *(rows.flatten(0, 1) for rows in steps),
    )


def orthogonalised(x: Tensor) -> Tensor:
    """Approximate U V' of x = U S V', for x [n, rows, cols], by five Newton-Schulz iterations.

    Coefficients of the quintic as published with the Muon optimiser. In float32: bfloat16 matrix
    products are slow on CPUs without instructions for them.
    """
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


class Optimiser:
    """Muon for the projections, AdamW for embeddings, norms and the delta net's small tensors."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.settings = settings
        self.matrices: dict[torch.Size, list[torch.nn.Parameter]] = {}
        rest, decayed = [], []
        for name, parameter in model.named_parameters():
            if name == "token_embd.weight":
                decayed.append(parameter)
            elif parameter.ndim == 2 and min(parameter.shape) >= 64:
                self.matrices.setdefault(parameter.shape, []).append(parameter)
            else:
                rest.append(parameter)
        self.momenta = {shape: torch.zeros(len(p), *shape) for shape, p in self.matrices.items()}
        self.adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            eps=1e-10,
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply the gradients at learning rate `rate` and clear them."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        for shape, parameters in self.matrices.items():
            gradient = torch.stack([parameter.grad for parameter in parameters])
            momentum = self.momenta[shape].lerp_(gradient, 0.05)
            update = orthogonalised(gradient.lerp(momentum, 0.95))
            # 0.2 sqrt(longer side) gives the entries the size that an AdamW step has
            scale = rate * 0.2 * math.sqrt(max(shape))
            for parameter, direction in zip(parameters, update, strict=True):
                parameter.mul_(1.0 - rate * self.settings.weight_decay)
                parameter.sub_(direction, alpha=scale)
                parameter.grad = None

    def state(self) -> dict[str, object]:
        """State for a checkpoint."""
        return {"adam": self.adam.state_dict(), "momenta": list(self.momenta.values())}

    def load(self, state: dict) -> None:
        """Restore what `state` returned."""
        self.adam.load_state_dict(state["adam"])
        for shape, saved in zip(self.momenta, state["momenta"], strict=True):
            self.momenta[shape].copy_(saved)


def learning_rate(step: int, settings: Settings) -> float:
    """Rate at `step`: linear warm-up, flat, then linear to 0 at the last step."""
    held = settings.hold * settings.steps
    falling = (settings.steps - step) / (settings.steps - held)
    return settings.learning_rate * min((step + 1) / settings.warmup, 1.0, falling)


class Batches:
    """Batches as a pure function of the step, so that resuming needs no state."""

    def __init__(self, stream: np.ndarray, settings: Settings) -> None:
        self.stream = stream.astype(np.int64)
        self.settings = settings
        self.n_blocks = (stream.size - 1) // BLOCK

    def block_starts(self, step: int) -> list[int]:
        """First tokens of the blocks of a step; every epoch has its own shuffle."""
        first = step * self.settings.blocks_per_step
        starts = []
        for i in range(first, first + self.settings.blocks_per_step):
            epoch, place = divmod(i, self.n_blocks)
            order = np.random.default_rng([self.settings.seed, epoch]).permutation(self.n_blocks)
            starts.append(int(order[place]) * BLOCK)
        return starts

    def batch(self, step: int) -> Tensor:
        """int64 tokens [B, T + 1] of a step: 2 x 256 or 1 x 512 per block."""
        length = BLOCK if step >= self.settings.long_from * self.settings.steps else BLOCK // 2
        rows = [
            self.stream[start + half : start + half + length + 1]
            for half in range(0, BLOCK, length)
            for start in self.block_starts(step)
        ]
        return torch.from_numpy(np.stack(rows))


@torch.no_grad()
def evaluate(model: Model, stream: np.ndarray, max_blocks: int, n_steps: int = 4) -> dict:
    """Held-out figures of a stream, in blocks of 512.

    Returns the mean cross-entropy of the trunk (nats per token), the perplexity, and per draft step
    how often the head's best token is the trunk's best token, over all positions.
    """
    n_blocks = min(max_blocks, (stream.size - 1) // BLOCK)
    loss, agree, count = 0.0, torch.zeros(n_steps), torch.zeros(n_steps)
    for i in range(n_blocks):
        block = torch.from_numpy(stream[i * BLOCK : (i + 1) * BLOCK + 1].astype(np.int64))[None]
        hidden = model.hidden(block[:, :-1])
        logits = model.logits(hidden)
        loss += torch.nn.functional.cross_entropy(logits[0], block[0, 1:]).item()
        best = logits[0].argmax(-1)
        for n, rows in enumerate(model.draft_steps(block[:, :-1], hidden, [1] * n_steps)):
            same = model.logits(rows)[0].argmax(-1) == best
            agree[n] += same[n:].sum()
            count[n] += BLOCK - n
    return {
        "tokens": n_blocks * BLOCK,
        "loss": round(loss / n_blocks, 4),
        "perplexity": round(math.exp(loss / n_blocks), 2),
        "agreement": [round(value, 4) for value in (agree / count).tolist()],
    }


def save_checkpoint(work: Path, content: dict) -> None:
    """Write WORK/checkpoint.pt so that a kill leaves the old one or the new one."""
    partial = work / "checkpoint.partial"
    torch.save(content, partial)
    os.replace(partial, work / "checkpoint.pt")


class Run:
    """One training run in a folder: corpus, model, optimiser and how far they are."""

    def __init__(self, packages: Path, work: Path, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(True)
        if not (work / "corpus.json").exists():
            prepare(packages, work)
        self.work = work
        self.settings = settings
        self.corpus = json.loads((work / "corpus.json").read_text())
        self.heldout = {kind: np.load(work / f"heldout_{kind}.npy") for kind in ("code", "prose")}
        self.batches = Batches(np.load(work / "train.npy"), settings)
        self.model = Model()
        self.model.initialise(settings.seed)
        self.optimiser = Optimiser(self.model, settings)
        self.step, self.tokens, self.seconds = 0, 0, 0.0

    def resume(self) -> None:
        """Take everything from the checkpoint.

        Raises:
            ValueError: if it was made with other settings or from another corpus.
        """
        checkpoint = torch.load(self.work / "checkpoint.pt", weights_only=True)
        if checkpoint["settings"] != asdict(self.settings) or checkpoint["corpus"] != self.corpus:
            raise ValueError("the checkpoint was made with other settings or from another corpus")
        self.model.load_state_dict(checkpoint["model"])
        self.optimiser.load(checkpoint["optimiser"])
        self.step, self.tokens, self.seconds = (
            checkpoint[key] for key in ("step", "tokens", "seconds")
        )

    def checkpoint(self) -> None:
        """Keep the state and print held-out figures of a few blocks."""
        content = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "settings": asdict(self.settings),
            "corpus": self.corpus,
        }
        save_checkpoint(self.work, content)
        print(f"step {self.step} held out, in part: {json.dumps(self.evaluate(8))}", flush=True)

    def evaluate(self, max_blocks: int) -> dict[str, dict]:
        """Held-out figures per kind of text."""
        return {
            kind: evaluate(self.model, stream, max_blocks) for kind, stream in self.heldout.items()
        }

    def train(self, stop_at: int) -> None:
        """Run steps up to `stop_at` or the end of the schedule.

        Raises:
            ArithmeticError: if a loss is not finite.
        """
        mean = None
        started = time.monotonic() - self.seconds
        last = min(stop_at, self.settings.steps)
        while self.step < last:
            batch = self.batches.batch(self.step)
            losses = training_losses(self.model, batch, self.settings.mtp_weights)
            losses.sum().backward()
            losses = losses.detach()
            if not losses.isfinite().all():
                raise ArithmeticError(f"step {self.step}: losses {losses.tolist()}")
            self.optimiser.step(learning_rate(self.step, self.settings))
            self.step += 1
            self.tokens += batch[:, 1:].numel()
            self.seconds = time.monotonic() - started
            mean = losses if mean is None else mean.lerp(losses, 0.05)
            if self.step % 20 == 0:
                values = " ".join(f"{value:.3f}" for value in mean.tolist())
                print(
                    f"step {self.step} tokens {self.tokens} seconds {self.seconds:.0f} "
                    f"losses {values}",
                    flush=True,
                )
            if self.step % self.settings.checkpoint_every == 0 or self.step == last:
                self.checkpoint()

    def report(self) -> None:
        """Write the run's facts and held-out figures to WORK/run.json and print them."""
        facts = {
            "corpus": self.corpus,
            "settings": asdict(self.settings),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "tokens": self.tokens,
            "minutes": round(self.seconds / 60, 1),
            "heldout": self.evaluate(FINAL_BLOCKS),
        }
        (self.work / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
        print(json.dumps(facts), flush=True)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("packages", type=Path, help="folder with the unpacked Debian packages")
    parser.add_argument("work", type=Path, help="folder for corpus, checkpoint and results")
    parser.add_argument("--resume", action="store_true", help="go on from WORK/checkpoint.pt")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="length of the schedule")
    parser.add_argument("--stop-at", type=int, default=10**9, help="stop early, for a trial")
    args = parser.parse_args()
    run = Run(args.packages, args.work, Settings(steps=args.steps))
    print(json.dumps({"corpus": run.corpus, "settings": asdict(run.settings)}), flush=True)
    if args.resume:
        run.resume()
    run.train(args.stop_at)
    if run.step == run.settings.steps:
        run.report()


if __name__ == "__main__":
    main()
