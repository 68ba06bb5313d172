//! `--seed`: the seeds of Python, NumPy, torch and few-shot sampling, in lm-eval's syntax.

/// Seeds of a run. A seed of `None` is picked at random at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seeds {
    /// Seeds of Python, NumPy, torch and few-shot sampling, in this order.
    pub(super) values: [Option<u64>; 4],
    /// True if only three seeds were given, so that the few-shot seed is the default.
    pub(super) is_fewshot_default: bool,
}

impl Seeds {
    /// Returns lm-eval's default seeds, with this few-shot seed.
    pub(super) fn lm_eval_defaults(fewshot: u64) -> Self {
        Self { values: [Some(0), Some(1234), Some(1234), Some(fewshot)], is_fewshot_default: false }
    }

    /// Returns the seeds of generation and of few-shot sampling. `drawn` replaces an unset seed.
    pub(super) fn resolve(&self, drawn: u64) -> (u64, u64) {
        let [_, _, torch, fewshot] = self.values;
        (torch.unwrap_or(drawn), fewshot.unwrap_or(drawn))
    }
}

/// Parses one seed for all, or three or four separated by commas. `None` leaves a seed unset.
pub(super) fn seeds(text: &str) -> Result<Seeds, String> {
    let wrong = || format!("expected one seed, or four separated by commas (each a number or None), found `{text}`");
    let seed = |word: &str| match word.trim().to_lowercase().as_str() {
        "none" => Ok(None),
        word => word.parse::<u64>().map(Some).map_err(|_| wrong()),
    };
    let (all, is_fewshot_default) = match text.split(',').map(seed).collect::<Result<Vec<_>, _>>()?.as_slice() {
        [one] => ([*one; 4], false),
        [a, b, c] => ([*a, *b, *c, Some(1234)], true),
        [a, b, c, d] => ([*a, *b, *c, *d], false),
        _ => return Err(wrong()),
    };
    Ok(Seeds { values: all, is_fewshot_default })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_read_as_lm_eval_reads_them() {
        assert_eq!(seeds("7").unwrap().values, [Some(7); 4]);
        assert_eq!(seeds("0,None,8, 52").unwrap().values, [Some(0), None, Some(8), Some(52)]);
        assert_eq!(seeds("none").unwrap().values, [None; 4]);
        let three = seeds("1,2,3").unwrap();
        assert_eq!((three.values[3], three.is_fewshot_default), (Some(1234), true));
        for wrong in ["1,2", "1,2,3,4,5", "x", "", "1.5"] {
            assert!(seeds(wrong).is_err(), "{wrong}");
        }
        assert_eq!(seeds("1,2,None,4").unwrap().resolve(99), (99, 4));
    }
}
