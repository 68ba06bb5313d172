"""Extrapolates to nodes of eight H100 by the model of docs/scaling.md: scaling_model.py

Nothing here is measured. ASSUMED holds the assumptions; the formulas for bytes are tested by tests/tests/it/traffic.rs. Prints
a table of meshes with the time of a step by its parts.
"""

from typing import NamedTuple

ASSUMED = {
    # Fraction of the 989 TFLOP/s bf16 peak of a GPU.
    "FLOP/s of a GPU": 0.45 * 989e12,
    # 450 GB/s each way between the GPUs of a node, of which four fifths are reached.
    "bytes/s in a node": 0.8 * 450e9,
    # 400 Gb/s per GPU between nodes, of which four fifths are reached.
    "bytes/s between nodes": 0.8 * 50e9,
    "s a call in a node": 10e-6,
    "s a call between nodes": 25e-6,
    "GPUs of a node": 8,
}
BF16, F32 = 2, 4


class Model(NamedTuple):
    name: str
    d: int
    f: int
    blocks: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @property
    def block(self) -> int:
        kv = self.kv_heads * self.head
        return 2 * self.d * self.heads * self.head + 2 * self.d * kv + 3 * self.d * self.f

    @property
    def params(self) -> int:
        return self.blocks * self.block + 2 * self.vocab * self.d

    def flops(self, length: int) -> float:
        """Returns the FLOPs per token, forward and backward: 6 per matmul weight, and causal attention."""
        products = self.blocks * self.block + self.vocab * self.d
        return 6 * products + 6 * self.blocks * self.heads * self.head * length


class Mesh(NamedTuple):
    gpus: int
    zero: int = 1
    tp: int = 1
    pp: int = 1
    ulysses: int = 1
    micros: int = 1
    # Ranks that shard one copy; 0 is all ranks.
    shards: int = 0

    @property
    def data(self) -> int:
        return self.gpus // (self.tp * self.pp * self.ulysses)


LLAMA_8B = Model("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_70B = Model("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256)
ROWS = [
    (LLAMA_8B, 8192, Mesh(8, zero=3, micros=2)),
    (LLAMA_8B, 8192, Mesh(64, zero=3, micros=2)),
    (LLAMA_8B, 8192, Mesh(64, zero=3, shards=8, micros=2)),
    (LLAMA_8B, 8192, Mesh(64, zero=1, tp=2, micros=4)),
    (LLAMA_8B, 131072, Mesh(8, zero=3, ulysses=8)),
    (LLAMA_70B, 8192, Mesh(64, zero=3, tp=8, micros=4)),
    (LLAMA_70B, 8192, Mesh(64, zero=1, tp=8, pp=4, micros=16)),
    (LLAMA_70B, 8192, Mesh(512, zero=1, tp=8, pp=4, micros=16)),
]


def main() -> None:
    print("| model, tokens of a row | mesh | compute | tensor, heads, stages | beside it | after it | bubble | step | of compute |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model, length, mesh in ROWS:
        compute, exposed, (gradients, room, weights), bubble = parts(model, length, mesh)
        step = (compute + exposed) / (1 - bubble) + max(0.0, gradients - room) + weights
        names = {"ZeRO": mesh.zero, "tensor": mesh.tp, "stages": mesh.pp, "Ulysses": mesh.ulysses}
        shown = ", ".join(f"{name} {n}" for name, n in names.items() if n > 1 or name == "ZeRO")
        shown += f", shares of {mesh.shards}" if mesh.shards else ""
        cells = [f"{model.name}, {length}", f"{mesh.gpus} GPUs: {shown}, {mesh.micros} micro-batch{'' if mesh.micros == 1 else 'es'}", f"{compute:.3f} s",
                 f"{exposed:.3f} s", f"{gradients:.3f} s", f"{weights:.3f} s", f"{100 * bubble:.0f} %", f"{step:.3f} s",
                 f"{100 * compute / step:.0f} %"]
        print("| " + " | ".join(cells) + " |")


def parts(model: Model, length: int, mesh: Mesh) -> tuple[float, float, tuple[float, float, float], float]:
    """Returns the seconds of a step: computation, blocking communication, overlapped communication with the computation that
    hides it, and communication after it; and the pipeline bubble."""
    n_parts = mesh.tp * mesh.pp * mesh.ulysses
    compute = mesh.micros * length * model.flops(length) / n_parts / ASSUMED["FLOP/s of a GPU"]
    tokens = length // mesh.ulysses
    blocks = model.blocks / mesh.pp
    activation = tokens * model.d * BF16
    exposed = 0.0
    if mesh.tp > 1:
        # Per layer six all-gathers and four reduce-scatters of tokens; two of the latter overlap weight gradients.
        calls = 8 * blocks + 4
        exposed += calls * seconds(activation * (mesh.tp - 1) / mesh.tp, mesh.tp)
    if mesh.ulysses > 1:
        width = (2 * model.heads + 2 * max(model.kv_heads, mesh.ulysses)) * model.head
        sent = tokens * width * BF16 * (mesh.ulysses - 1) / mesh.ulysses
        exposed += 2 * blocks * seconds(sent, mesh.ulysses)
    if mesh.pp > 1:
        exposed += 2 * seconds(activation, mesh.tp * mesh.pp * 8)
    exposed *= mesh.micros
    weights = model.params / (mesh.tp * mesh.pp)
    ranks = mesh.data * mesh.ulysses
    shares = mesh.shards or ranks
    copies = ranks // shares
    times = mesh.micros if mesh.zero >= 2 else 1
    gradients = times * seconds(weights * F32 * (shares - 1) / shares, shares * mesh.tp)
    if copies > 1:
        gradients += times * seconds(2 * weights / shares * F32 * (copies - 1) / copies, ranks * mesh.tp)
    gathers = 2 * mesh.micros if mesh.zero == 3 else 1
    gathered = gathers * seconds(weights * BF16 * (shares - 1) / shares, shares * mesh.tp)
    # Two thirds of the computation is backward. Gradients are reduced once, in the last micro-batch.
    room = 2 / 3 * compute / (1 if mesh.zero >= 2 else mesh.micros)
    around = (gradients + gathered, compute, 0.0) if mesh.zero == 3 else (gradients, room, gathered)
    bubble = (mesh.pp - 1) / (mesh.micros + mesh.pp - 1)
    return compute, exposed, around, bubble


def seconds(n_bytes: float, ranks: int) -> float:
    """Returns the seconds of a collective over this number of ranks."""
    where = "in a node" if ranks <= ASSUMED["GPUs of a node"] else "between nodes"
    return n_bytes / ASSUMED[f"bytes/s {where}"] + ASSUMED[f"s a call {where}"]


if __name__ == "__main__":
    main()
