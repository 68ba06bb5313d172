//! Log-probabilities of tokens from a row of logits.

use candlewick_text::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};

use super::job::{TokenLogprobs, TokenText};

/// Returns the log-probability of `id`, and those of the `n_top` most probable tokens, from logits `[v]` after
/// `previous`.
pub(super) fn token_logprobs(
    tokenizer: &Tokenizer,
    logits_v: &[f32],
    previous: u32,
    id: u32,
    n_top: usize,
) -> Result<TokenLogprobs, TokenizerError> {
    let norm = log_sum_exp(logits_v);
    let logprob = |id: u32| (f64::from(logits_v[id as usize]) - norm) as f32;
    let text = |id: u32| token_text(tokenizer, Some(previous), id);
    let entry = |id: u32| text(id).map(|text| (text, logprob(id)));
    let top = largest(logits_v, n_top).into_iter().map(entry).collect::<Result<_, _>>()?;
    Ok(TokenLogprobs { token: text(id)?, logprob: Some(logprob(id)), top })
}

/// Returns the text that a token adds after `previous`.
pub(super) fn token_text(tokenizer: &Tokenizer, previous: Option<u32>, id: u32) -> Result<TokenText, TokenizerError> {
    let decode = |ids: &[u32]| tokenizer.decode(ids, SpecialTokens::Include);
    let alone = match String::from_utf8(tokenizer.token_bytes(id)?) {
        Ok(text) => text,
        Err(part) => {
            let bytes = part.into_bytes();
            let escaped: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
            return Ok(TokenText { text: format!("bytes:{escaped}"), bytes });
        }
    };
    // Some decoders strip the first token's whitespace.
    let text = match previous {
        Some(previous) => {
            let (before, both) = (decode(&[previous])?, decode(&[previous, id])?);
            both.strip_prefix(&before).map(str::to_owned)
        }
        None => None,
    };
    let text = text.unwrap_or(alone);
    Ok(TokenText { bytes: text.as_bytes().to_vec(), text })
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln()
}

/// Returns the indices of the `n` largest values in descending order, the first of equal ones first.
fn largest(values: &[f32], n: usize) -> Vec<u32> {
    let descending = |a: &u32, b: &u32| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..values.len() as u32).collect();
    if n < ids.len() {
        ids.select_nth_unstable_by(n, descending);
        ids.truncate(n);
    }
    ids.sort_unstable_by(descending);
    ids
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_largest_values_are_in_order() {
        let values = [0.5, 2.0, -1.0, 2.0, 3.0];
        assert_eq!(
            [0, 1, 3, 5, 9].map(|n| largest(&values, n)),
            [vec![], vec![4], vec![4, 1, 3], vec![4, 1, 3, 0, 2], vec![4, 1, 3, 0, 2]]
        );
    }

    #[test]
    fn log_probabilities_are_normalized() {
        let logits = [1e4f32, 1e4, f32::MIN];
        assert!((log_sum_exp(&logits) - (1e4 + 2f64.ln())).abs() < 1e-9);
    }

    #[test]
    fn texts_of_tokens_concatenate_to_the_whole_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer");
        let tokenizer = Tokenizer::from_directory(folder).unwrap();
        let ids = tokenizer.encode("Say wolf 4 times.", SpecialTokens::Exclude).unwrap();
        let previous = std::iter::once(None).chain(ids.iter().copied().map(Some));
        let texts = ids.iter().zip(previous).map(|(id, previous)| token_text(&tokenizer, previous, *id).unwrap().text);
        assert_eq!(texts.collect::<String>(), "Say wolf 4 times.");
        let parts = tokenizer.encode("🙂", SpecialTokens::Exclude).unwrap();
        let parts: Vec<TokenText> = parts.iter().map(|id| token_text(&tokenizer, None, *id).unwrap()).collect();
        assert_eq!(parts.iter().flat_map(|part| part.bytes.clone()).collect::<Vec<u8>>(), "🙂".as_bytes());
        assert_eq!((parts.len(), &*parts[0].text, &*parts[3].text), (4, "bytes:\\xf0", "bytes:\\x82"));
    }
}
