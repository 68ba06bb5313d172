//! Calls that some versions of cuDNN compute wrongly.

/// Version whose sliding windows give NaN over long sequences, 9.14.0. TransformerEngine refuses the same calls
/// (`nvte_get_fused_attn_backend`).
const WRONG_WINDOWS: usize = 9_14_00;
/// Most keys of a sequence for which a window is right in [`WRONG_WINDOWS`].
const MAX_KEYS: usize = 1024;

/// Returns the reason why a version, such as 91400, must not compute a call, if any.
///
/// `window` is 0 without a sliding window; `max_keys` counts the keys of the longest sequence. Packed sequences always
/// have a padding mask, without which the windows are right.
pub(super) fn fault(version: usize, window: i64, max_keys: i64) -> Option<String> {
    let is_wrong = version == WRONG_WINDOWS && window > 0 && max_keys > MAX_KEYS as i64;
    is_wrong.then(|| {
        format!(
            "cuDNN {} gives NaN for a sliding window over more than {MAX_KEYS} keys; install another version",
            dotted(version)
        )
    })
}

/// Formats a version: 91900 becomes 9.19.0.
pub(super) fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(version: usize, window: i64, max_keys: i64, want: Option<&str>) {
        let got = fault(version, window, max_keys);
        match want {
            None => assert_eq!(got, None, "{version}, window {window}, {max_keys} keys"),
            Some(part) => assert!(got.as_ref().is_some_and(|why| why.contains(part)), "{got:?}"),
        }
    }

    #[test]
    fn windows_over_long_sequences_are_left_out_of_one_version() {
        let named = Some("cuDNN 9.14.0 gives NaN for a sliding window over more than 1024 keys");
        for max_keys in [1025, 2048, 4096, 8192] {
            check(91_400, 512, max_keys, named);
            check(91_400, 0, max_keys, None);
            for version in [91_002, 91_301, 91_401, 91_500, 92_600] {
                check(version, 512, max_keys, None);
            }
        }
        check(91_400, 512, 1024, None);
    }
}
