"""Writes trainer/tests/fixtures/schedules.json: learning rates of transformers' get_scheduler.

Run: python tests/reference/schedules.py   (torch and transformers 5)

Each case holds our form of the schedule and the rates that LambdaLR gave to a one-parameter
optimizer at every step from 0 to a little past the end.
"""

import json
import math
import pathlib

import torch
import transformers

OUT = pathlib.Path(__file__).parents[2] / "trainer/tests/fixtures/schedules.json"


def span(value):
    return {"ratio": value} if isinstance(value, float) else {"steps": value}


def steps(value, total):
    return math.ceil(total * value) if isinstance(value, float) else value


def rates(name, kwargs, warmup, total, base_lr):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base_lr)
    schedule = transformers.get_scheduler(
        name, optimizer, warmup, total, scheduler_specific_kwargs=kwargs or None
    )
    values = []
    for _ in range(total + 3):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


def plain(theirs, shape, kwargs=None):
    return [(theirs, kwargs or {}, shape)]


def shapes():
    yield from plain("constant_with_warmup", {"name": "constant"})
    yield from plain("linear", {"name": "linear"})
    for cycles in (0.5, 1.75):
        yield from plain("cosine", {"name": "cosine", "num_cycles": cycles}, {"num_cycles": cycles})
    yield from plain(
        "cosine_with_restarts", {"name": "cosine_with_restarts", "num_cycles": 3}, {"num_cycles": 3}
    )
    for key, value in (("min_lr", 3e-5), ("min_lr_rate", 0.1)):
        shape = {"name": "cosine_with_min_lr", "num_cycles": 0.5, "floor": {key: value}}
        yield from plain("cosine_with_min_lr", shape, {key: value})
    for timescale in (None, 7):
        kwargs = {} if timescale is None else {"timescale": timescale}
        yield from plain("inverse_sqrt", {"name": "inverse_sqrt", "timescale": timescale}, kwargs)
    for power in (1.0, 2.5):
        shape = {"name": "polynomial", "lr_end": 1e-7, "power": power}
        yield from plain("polynomial", shape, {"lr_end": 1e-7, "power": power})


def wsd(warmup, stable, decay, warmup_type, decay_type, min_lr_ratio, total):
    shape = {
        "name": "warmup_stable_decay",
        "stable": None if stable is None else span(stable),
        "decay": span(decay),
        "warmup_type": warmup_type,
        "decay_type": decay_type,
        "min_lr_ratio": min_lr_ratio,
        "num_cycles": 0.5,
    }
    kwargs = {
        "num_decay_steps": steps(decay, total),
        "warmup_type": warmup_type,
        "decay_type": decay_type,
        "min_lr_ratio": min_lr_ratio,
    }
    if stable is not None:
        kwargs["num_stable_steps"] = steps(stable, total)
    return ("warmup_stable_decay", kwargs, shape)


def case(theirs, kwargs, shape, warmup, total, base_lr):
    return {
        "schedule": {"warmup": span(warmup), "shape": shape},
        "total_steps": total,
        "base_lr": base_lr,
        "lr": rates(theirs, kwargs, steps(warmup, total), total, base_lr),
    }


def cases():
    for theirs, kwargs, shape in shapes():
        for warmup, total in ((0, 13), (4, 20), (0.1, 23)):
            yield case(theirs, kwargs, shape, warmup, total, 3e-4)
    total = 24
    for ramp in ("linear", "cosine", "1-sqrt"):
        for warmup, stable, decay, floor in ((0, None, 6, 0.0), (3, None, 0.25, 0.1), (5, 4, 8, 0.05)):
            theirs, kwargs, shape = wsd(warmup, stable, decay, ramp, ramp, floor, total)
            yield case(theirs, kwargs, shape, warmup, total, 1e-3)


if __name__ == "__main__":
    rows = [json.dumps(row) for row in cases()]
    OUT.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    print(f"{len(rows)} cases, {OUT.stat().st_size} bytes, transformers {transformers.__version__}")
