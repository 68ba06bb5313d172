//! Validation of the `Precompiled` normalizer: SentencePiece's table in base64.
//!
//! The table is a length, a trie of that length and strings. The tokenizers crate allocates the length before it
//! reads the trie.

use serde_json::Value as Json;

/// Number of base64 characters that hold the length.
const HEAD: usize = 8;

/// Checks the length in every `precompiled_charsmap` of a tokenizer.json.
pub(super) fn check(json: &Json) -> Result<(), String> {
    match json {
        Json::Object(map) => {
            let charsmap = map.get("precompiled_charsmap").and_then(Json::as_str);
            charsmap.map_or(Ok(()), check_length)?;
            ["normalizer", "normalizers"].iter().filter_map(|key| map.get(*key)).try_for_each(check)
        }
        Json::Array(items) => items.iter().try_for_each(check),
        _ => Ok(()),
    }
}

fn check_length(charsmap: &str) -> Result<(), String> {
    let n_bytes = charsmap.len() / 4 * 3;
    match length(charsmap) {
        Some(length) if length <= n_bytes => Ok(()),
        Some(length) => Err(format!(
            "precompiled_charsmap has at most {n_bytes} bytes, and claims {length}; save the tokenizer again"
        )),
        None => Err("precompiled_charsmap is too short or not base64; save the tokenizer again".into()),
    }
}

/// Decodes the little-endian number of the first four bytes.
fn length(charsmap: &str) -> Option<usize> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        b'=' => Some(0),
        _ => None,
    };
    let head = charsmap.as_bytes().get(..HEAD)?;
    let bits = head.iter().try_fold(0_u64, |bits, c| Some(bits << 6 | u64::from(digit(*c)?)))?;
    // The lower 48 bits hold six bytes; the first four of them are the number.
    let bytes = [40, 32, 24, 16].map(|shift| (bits >> shift) as u8);
    usize::try_from(u32::from_le_bytes(bytes)).ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_length_is_the_first_four_bytes() {
        // Bytes 4, 3, 2, 1, 0, 0.
        assert_eq!(length("BAMCAQAA"), Some(0x0102_0304));
        assert_eq!(length("AgAAAAAA"), Some(2));
        assert_eq!((length("AgAA"), length("A*AAAAAA")), (None, None));
    }

    #[test]
    fn a_table_that_claims_more_than_it_has_is_refused() {
        let nested = |charsmap: &str| json!({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": charsmap}]}});
        assert_eq!(check(&nested("AgAAAAAA")), Ok(()));
        assert!(check(&nested("/////wAA")).unwrap_err().contains("claims 4294967295"));
        assert!(check(&nested("")).unwrap_err().contains("too short"));
    }
}
