"""The built-in model in PyTorch: a small hybrid language model with one MTP block.

It computes what llama.cpp computes for architecture `qwen35`: a trunk that alternates gated delta
net and full-attention layers, and one full-attention block (the head) that sees a token together
with the trunk's hidden row of the position before it. Parameter names are the GGUF tensor names;
only `ssm_a` is kept in another form while training.

Shapes in the docstrings: B sequences, T positions, N rows, D = n_embd, V = n_vocab, H heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CHUNK = 64  # positions that the delta net handles at once


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are the shipped model's."""

    n_vocab: int = 4096
    n_embd: int = 192
    n_trunk: int = 4
    full_attention_interval: int = 2
    n_ff: int = 512
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    rope_dim: int = 32
    rope_base: float = 10000.0
    rope_sections: tuple[int, int, int, int] = (6, 5, 5, 0)
    n_delta_head: int = 4
    delta_state: int = 64
    conv_kernel: int = 4
    eps: float = 1e-6
    n_ctx: int = 512

    @property
    def delta_inner(self) -> int:
        """Width of the delta net's values, all heads together."""
        return self.n_delta_head * self.delta_state

    def is_recurrent(self, layer: int) -> bool:
        """Whether trunk layer `layer` is a delta net rather than full attention."""
        return (layer + 1) % self.full_attention_interval != 0


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; same shape out."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def linear(n_in: int, n_out: int) -> nn.Linear:
    """Build a projection without bias."""
    return nn.Linear(n_in, n_out, bias=False)


class Rotary(nn.Module):
    """Rotary position embedding of the first `rope_dim` channels, halves paired (i, i + dim/2).

    All four sections of a text token's position are equal, so sections do not show here.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        half = shape.rope_dim // 2
        frequency = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(shape.n_ctx, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.half = half

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x of shape [B, H, T, head_dim] for positions 0..T-1."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        first, second, rest = x.split([self.half, self.half, x.shape[-1] - 2 * self.half], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class DraftKeys:
    """Keys and values [B, H, T, head_dim] of the head's earlier draft steps, step 1 first."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add the rows of the next draft step."""
        self.keys.append(key)
        self.values.append(value)

    def first(self, n_sequences: int) -> DraftKeys:
        """View of the first `n_sequences` sequences."""
        view = DraftKeys()
        view.keys = [key[:n_sequences] for key in self.keys]
        view.values = [value[:n_sequences] for value in self.values]
        return view


class AttentionBlock(nn.Module):
    """Pre-norm gated full attention with query and key norms, then a SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, width = shape.n_embd, shape.head_dim
        self.shape = shape
        self.attn_norm = RmsNorm(d, shape.eps)
        self.attn_q = linear(d, shape.n_head * width * 2)  # per head: query, then gate
        self.attn_k = linear(d, shape.n_head_kv * width)
        self.attn_v = linear(d, shape.n_head_kv * width)
        self.attn_q_norm = RmsNorm(width, shape.eps)
        self.attn_k_norm = RmsNorm(width, shape.eps)
        self.attn_output = linear(shape.n_head * width, d)
        add_feed_forward(self, shape)

    def attend(self, x: Tensor, rotary: Rotary, draft: DraftKeys | None) -> Tensor:
        """Attend over normalised x [B, T, D]; with `draft`, as one more draft step (see Model)."""
        batch, length, _ = x.shape
        width, groups = self.shape.head_dim, self.shape.n_head // self.shape.n_head_kv
        q, gate = self.attn_q(x).view(batch, length, -1, 2 * width).split(width, -1)
        k = self.attn_k(x).view(batch, length, -1, width)
        v = self.attn_v(x).view(batch, length, -1, width).transpose(1, 2)
        q = rotary(self.attn_q_norm(q).transpose(1, 2))
        k = rotary(self.attn_k_norm(k).transpose(1, 2))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if draft is not None:
            draft.append(k, v)
        if draft is None or len(draft.keys) == 1:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = attend_as_draft(q, draft)
        mixed = mixed.transpose(1, 2) * gate.sigmoid()
        return self.attn_output(mixed.reshape(batch, length, -1))

    def forward(self, x: Tensor, rotary: Rotary, draft: DraftKeys | None = None) -> Tensor:
        """Apply the block to x [B, T, D]."""
        x = x + self.attend(self.attn_norm(x), rotary, draft)
        return x + feed_forward(self, x)


def attend_as_draft(q: Tensor, draft: DraftKeys) -> Tensor:
    """Attention of draft step n >= 2 at every position, each from the root n - 1 positions back.

    The query at position p sees step 1 rows (made from the trunk's hidden rows) at positions up to
    p - n + 1, and for m = 2..n the one step m row that its own draft made, at p - n + m. `draft`
    holds steps 1..n. Returns [B, H, T, head_dim].
    """
    n, length = len(draft.keys), q.shape[2]
    q = q * q.shape[-1] ** -0.5
    root = torch.arange(length)[:, None] - (n - 1)
    real = (q @ draft.keys[0].transpose(-1, -2)).masked_fill(
        torch.arange(length)[None, :] > root, -torch.inf
    )
    own_values = [delayed(draft.values[m - 1], n - m) for m in range(2, n + 1)]
    own = [(q * delayed(draft.keys[m - 1], n - m)).sum(-1, keepdim=True) for m in range(2, n + 1)]
    weights = torch.cat([real, *own], -1).softmax(-1)
    mixed = weights[..., :length] @ draft.values[0]
    for i, value in enumerate(own_values):
        mixed = mixed + weights[..., length + i, None] * value
    return mixed


def delayed(x: Tensor, steps: int) -> Tensor:
    """Shift x [..., T, C] so that position p holds what was at p - steps, zeros before that."""
    if steps == 0:
        return x
    return functional.pad(x, (0, 0, steps, 0))[..., : x.shape[-2], :]


class Conv(nn.Module):
    """Causal depthwise convolution over time; weight [channels, kernel], newest position last."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x [B, T, channels]; same shape out."""
        kernel, length = self.weight.shape[1], x.shape[1]
        padded = functional.pad(x, (0, 0, kernel - 1, 0))
        out = padded[:, :length] * self.weight[:, 0]
        for j in range(1, kernel):
            out = torch.addcmul(out, padded[:, j : j + length], self.weight[:, j])
        return out


class Bias(nn.Module):
    """Only a bias [width]: the name that llama.cpp gives the delta net's time-step offset."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width))


class DeltaBlock(nn.Module):
    """Pre-norm gated delta net, then a SwiGLU feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, inner, heads = shape.n_embd, shape.delta_inner, shape.n_delta_head
        self.shape = shape
        self.attn_norm = RmsNorm(d, shape.eps)
        self.attn_qkv = linear(d, 3 * inner)  # all queries, all keys, all values
        self.attn_gate = linear(d, inner)
        self.ssm_conv1d = Conv(3 * inner, shape.conv_kernel)
        self.ssm_beta = linear(d, heads)
        self.ssm_alpha = linear(d, heads)
        self.ssm_dt = Bias(heads)
        self.ssm_a_log = nn.Parameter(torch.empty(heads))  # the GGUF holds ssm_a = -exp(ssm_a_log)
        self.ssm_norm = RmsNorm(shape.delta_state, shape.eps)
        self.ssm_out = linear(inner, d)
        add_feed_forward(self, shape)

    def mix(self, x: Tensor) -> Tensor:
        """Run the delta net over normalised x [B, T, D]."""
        batch, length, _ = x.shape
        heads, state = self.shape.n_delta_head, self.shape.delta_state
        qkv = functional.silu(self.ssm_conv1d(self.attn_qkv(x)))
        q, k, v = (
            part.view(batch, length, heads, state).transpose(1, 2) for part in qkv.chunk(3, -1)
        )
        q = unit_rows(q, self.shape.eps) * state**-0.5
        k = unit_rows(k, self.shape.eps)
        beta = self.ssm_beta(x).sigmoid().transpose(1, 2)
        step = functional.softplus(self.ssm_alpha(x) + self.ssm_dt.bias)
        decay = (-self.ssm_a_log.exp() * step).transpose(1, 2)
        out = gated_delta_rule(q, k, v, decay, beta).transpose(1, 2)
        gate = self.attn_gate(x).view(batch, length, heads, state)
        return self.ssm_out((self.ssm_norm(out) * functional.silu(gate)).reshape(batch, length, -1))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Apply the block to x [B, T, D]; the delta net needs no positions."""
        del rotary
        x = x + self.mix(self.attn_norm(x))
        return x + feed_forward(self, x)


def unit_rows(x: Tensor, eps: float) -> Tensor:
    """Scale the last axis to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Read a decaying associative memory that is corrected at every position.

    With state S [C, C] per head, position by position: S <- exp(decay) S; S <- S + beta k (v - S'k)
    (as outer product); out = S'q. Here CHUNK positions at a time: inside a chunk the corrections
    form a unit lower triangular system, between chunks S is carried.

    Args: q, k, v of shape [B, H, T, C]; decay (log, <= 0) and beta of shape [B, H, T].
    Returns [B, H, T, C].
    """
    length = q.shape[2]
    if pad := -length % CHUNK:
        q, k, v = (functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        decay, beta = (functional.pad(x, (0, pad)) for x in (decay, beta))
    q, k, v, decay, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, decay, beta))
    total = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    k_beta = k * beta[..., None]
    system = ((k_beta @ k.transpose(-1, -2)) * between).tril(-1)
    since_start = total.exp()[..., None]
    right = torch.cat([v * beta[..., None], k_beta * since_start], -1)
    solved = torch.linalg.solve_triangular(
        system + torch.eye(CHUNK), right, upper=False, unitriangular=True
    )
    new_v, read_k = solved.chunk(2, -1)
    within = (q @ k.transpose(-1, -2)) * between
    q_start = q * since_start
    k_end = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    chunks = []
    for c in range(q.shape[2]):
        corrected = new_v[:, :, c] - read_k[:, :, c] @ state
        chunks.append(q_start[:, :, c] @ state + within[:, :, c] @ corrected)
        state = state * kept[:, :, c] + k_end[:, :, c] @ corrected
    return torch.stack(chunks, 2).flatten(2, 3)[:, :, :length]


def add_feed_forward(block: nn.Module, shape: Shape) -> None:
    """Give a block its feed-forward parameters under llama.cpp's names."""
    block.post_attention_norm = RmsNorm(shape.n_embd, shape.eps)
    block.ffn_gate = linear(shape.n_embd, shape.n_ff)
    block.ffn_up = linear(shape.n_embd, shape.n_ff)
    block.ffn_down = linear(shape.n_ff, shape.n_embd)


def feed_forward(block: nn.Module, x: Tensor) -> Tensor:
    """Compute a block's SwiGLU feed-forward of x [B, T, D], without the residual."""
    x = block.post_attention_norm(x)
    return block.ffn_down(functional.silu(block.ffn_gate(x)) * block.ffn_up(x))


class NextN(nn.Module):
    """What the MTP block has beyond a full-attention block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eh_proj = linear(2 * shape.n_embd, shape.n_embd)
        self.enorm = RmsNorm(shape.n_embd, shape.eps)
        self.hnorm = RmsNorm(shape.n_embd, shape.eps)
        self.shared_head_norm = RmsNorm(shape.n_embd, shape.eps)


class Model(nn.Module):
    """Trunk and head; embeddings are tied with the output projection of both."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.output_norm = RmsNorm(shape.n_embd, shape.eps)
        self.blk = nn.ModuleList(
            DeltaBlock(shape) if shape.is_recurrent(layer) else AttentionBlock(shape)
            for layer in range(shape.n_trunk)
        )
        head = AttentionBlock(shape)
        head.nextn = NextN(shape)
        self.blk.append(head)
        self.rotary = Rotary(shape)

    def initialise(self, seed: int) -> None:
        """Set every parameter from `seed`, in a fixed order."""
        generator = torch.Generator().manual_seed(seed)
        residual = 0.5 / math.sqrt(2 * self.shape.n_trunk)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("ssm_a_log"):
                    parameter.uniform_(0.0, math.log(16.0), generator=generator)
                elif name.endswith("ssm_dt.bias"):
                    # softplus(bias) between 0.001 and 0.1, evenly on a log scale
                    step = torch.empty_like(parameter).uniform_(
                        math.log(0.001), math.log(0.1), generator=generator
                    )
                    parameter.copy_(step.exp().expm1().log())
                elif name.endswith("ssm_conv1d.weight"):
                    bound = self.shape.conv_kernel**-0.5
                    parameter.uniform_(-bound, bound, generator=generator)
                elif name == "token_embd.weight":
                    parameter.normal_(0.0, 0.03, generator=generator)
                elif parameter.ndim == 2:
                    scale = residual if "ffn_down" in name or "out" in name else 0.5
                    parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5, generator=generator)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Hidden rows [B, T, D] after the output norm, for tokens int64 [B, T]."""
        x = self.token_embd(tokens)
        for layer in range(self.shape.n_trunk):
            x = self.blk[layer](x, self.rotary)
        return self.output_norm(x)

    def logits(self, rows: Tensor) -> Tensor:
        """Logits [..., V] of hidden rows or head rows [..., D]."""
        return rows @ self.token_embd.weight.T

    def draft_steps(self, tokens: Tensor, hidden: Tensor, sequences: list[int]) -> list[Tensor]:
        """Head rows of draft steps 1..n at every position, fed the true tokens.

        Step 1 at position p takes token p and the hidden row of p - 1 (zeros at p = 0), and its
        logits are about token p + 1. Step n >= 2 takes token p and the head's own row of step
        n - 1 at p - 1. So step n at p is what a draft started at p - n + 1 gives for token p + 1
        when its first n - 1 tokens are right. At p < n - 1 there is no such draft: ignore them.

        Args:
            tokens: int64 [B, T].
            hidden: [B, T, D] from `hidden`.
            sequences: how many of the first sequences each step covers, never increasing.

        Returns:
            One tensor [sequences[n - 1], T, D] per step, after `shared_head_norm`.
        """
        block = self.blk[self.shape.n_trunk]
        nextn = block.nextn
        embedded = nextn.enorm(self.token_embd(tokens))
        rows, draft, steps = hidden, DraftKeys(), []
        for count in sequences:
            draft = draft.first(count)
            before = nextn.hnorm(delayed(rows[:count], 1))
            x = nextn.eh_proj(torch.cat([embedded[:count], before], -1))
            rows = nextn.shared_head_norm(block(x, self.rotary, draft))
            steps.append(rows)
        return steps
