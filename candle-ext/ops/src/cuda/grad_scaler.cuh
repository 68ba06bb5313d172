// Layout of the grad scaler's state: f32, in the order of grad_scaler/mod.rs.
#pragma once

enum { NORM, FACTOR, OUTCOME, N_UPDATES, LOSS_SCALE, GOOD_STEPS, HYSTERESIS_LEFT };
enum { APPLIED, OVERFLOWED, NON_FINITE, HALTED, LOSS_SPIKE };
