//! `--seed` as lm-eval reads it: of Python, NumPy, torch and the examples.

/// The seeds; one that is not set is drawn when the run begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seeds {
    /// Of Python, NumPy, torch and the examples.
    pub(super) all: [Option<u64>; 4],
    /// Whether the last is the default, because three were given.
    pub(super) is_completed: bool,
}

impl Seeds {
    /// lm-eval's own, with this one for the examples.
    pub(super) fn lm_eval_defaults(fewshot: u64) -> Self {
        Self { all: [Some(0), Some(1234), Some(1234), Some(fewshot)], is_completed: false }
    }

    /// What seeds sampling, and what the examples. `drawn` stands in for one that is not set.
    pub(super) fn resolve(&self, drawn: u64) -> (u64, u64) {
        let [_, _, torch, fewshot] = self.all;
        (torch.unwrap_or(drawn), fewshot.unwrap_or(drawn))
    }
}

/// Reads one number for all, three or four; `None` leaves one unset.
pub(super) fn seeds(text: &str) -> Result<Seeds, String> {
    let wrong = || format!("expected a number, or four with commas of which some may be None, found `{text}`");
    let seed = |word: &str| match word.trim().to_lowercase().as_str() {
        "none" => Ok(None),
        word => word.parse::<u64>().map(Some).map_err(|_| wrong()),
    };
    let (all, is_completed) = match text.split(',').map(seed).collect::<Result<Vec<_>, _>>()?.as_slice() {
        [one] => ([*one; 4], false),
        [a, b, c] => ([*a, *b, *c, Some(1234)], true),
        [a, b, c, d] => ([*a, *b, *c, *d], false),
        _ => return Err(wrong()),
    };
    Ok(Seeds { all, is_completed })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_read_as_lm_eval_reads_them() {
        assert_eq!(seeds("7").unwrap().all, [Some(7); 4]);
        assert_eq!(seeds("0,None,8, 52").unwrap().all, [Some(0), None, Some(8), Some(52)]);
        assert_eq!(seeds("none").unwrap().all, [None; 4]);
        let three = seeds("1,2,3").unwrap();
        assert_eq!((three.all[3], three.is_completed), (Some(1234), true));
        for wrong in ["1,2", "1,2,3,4,5", "x", "", "1.5"] {
            assert!(seeds(wrong).is_err(), "{wrong}");
        }
        assert_eq!(seeds("1,2,None,4").unwrap().resolve(99), (99, 4));
    }
}
