//! The longest row that fits, by the formulas of the estimate.

use super::{Capacity, Setup, estimate};

/// No model reads more at once.
const MOST: u64 = 1 << 24;

/// Returns the most tokens of a row with which `setup` needs no more than there is; `None` if even one is too many.
///
/// Every term grows with the tokens, so halving an interval finds it.
pub fn longest(setup: &Setup, capacity: &Capacity) -> Option<u64> {
    let fits = |row_tokens: u64| estimate(&Setup { row_tokens, ..setup.clone() }).shortages(capacity).is_empty();
    if !fits(1) {
        return None;
    }
    let (mut fitting, mut too_long) = (1, MOST);
    while too_long - fitting > 1 {
        let middle = fitting.midpoint(too_long);
        if fits(middle) {
            fitting = middle;
        } else {
            too_long = middle;
        }
    }
    Some(fitting)
}
