//! Constrained decoding: masks of the tokens that continue a text of a grammar, computed by llguidance.

use std::sync::Arc;

use anyhow::{Error, Result, ensure};
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer, TokenizerError};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie};

/// Compiler of grammars for the tokens of a model.
pub struct GrammarCompiler {
    factory: ParserFactory,
    n_vocab: usize,
}

/// Grammar of a text, and the state after the tokens so far.
pub struct TokenConstraint {
    matcher: Matcher,
    n_vocab: usize,
    /// Tokens that continue the text, if they are computed already.
    allowed: Option<Result<SimpleVob>>,
}

/// Limits on time and memory of a grammar. A state of the lexer has at most 2 kB, and a unit of fuel is at most 70 ns.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 20_000,
        max_grammar_size: 100_000,
        step_lexer_fuel: 60_000,
        step_max_items: 30_000,
        verbose_errors: false,
        precompute_large_lexemes: false,
        ..ParserLimits::default()
    }
}

/// Longest token in bytes that a constrained text may have.
const MAX_TOKEN_BYTES: usize = 256;

impl GrammarCompiler {
    /// Creates a compiler for a model with `n_vocab` logits.
    ///
    /// # Errors
    /// If a token cannot be decoded.
    pub fn new(tokenizer: &Tokenizer, n_vocab: usize) -> Result<Self> {
        let mut words = words(tokenizer, n_vocab)?;
        // The end of the text is a token of its own, because a model may have several stop tokens.
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], &b"<end of text>"[..]].concat());
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, n_vocab as u32), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, n_vocab })
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// If the grammar has an unsupported part, or exceeds a limit.
    pub fn compile(&self, grammar: TopLevelGrammar) -> Result<TokenConstraint> {
        let matcher = Matcher::new(Ok(self.factory.create_parser(grammar).map_err(shortened)?));
        Ok(TokenConstraint { matcher, n_vocab: self.n_vocab, allowed: None })
    }
}

impl TokenConstraint {
    /// Returns a copy with a lexer, and limits, of its own.
    pub fn independent(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), n_vocab: self.n_vocab, allowed: None }
    }

    /// Computes the next mask, which takes milliseconds.
    pub fn prepare(&mut self) {
        self.allowed = Some(self.matcher.compute_mask_or_eos());
    }

    /// Sets the logits of tokens that cannot continue the text to negative infinity.
    ///
    /// All stop tokens may end a complete text. Before, the grammar may allow `text_stop_ids`, but not `stop_ids`.
    pub fn mask(&mut self, logits: &mut [f32], stop_ids: &[u32], text_stop_ids: &[u32]) -> Result<()> {
        let allowed = self.allowed.take().unwrap_or_else(|| self.matcher.compute_mask_or_eos()).map_err(shortened)?;
        ensure!(!allowed.is_zero(), "no token of the vocabulary continues the text");
        let stops: Vec<(u32, f32)> = match allowed.get(self.n_vocab) {
            true => {
                let ids = stop_ids.iter().chain(text_stop_ids);
                ids.filter_map(|id| Some((*id, *logits.get(*id as usize)?))).collect()
            }
            false => Vec::new(),
        };
        for (id, logit) in logits.iter_mut().enumerate() {
            if id >= self.n_vocab || !allowed.get(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        stop_ids.iter().for_each(|id| set(logits, *id, f32::NEG_INFINITY));
        stops.into_iter().for_each(|(id, logit)| set(logits, id, logit));
        Ok(())
    }

    /// Adds a token, and returns true if no token can continue the text.
    pub fn push(&mut self, token: u32) -> Result<bool> {
        self.allowed = None;
        self.matcher.consume_token(token).map_err(shortened)?;
        Ok(self.matcher.is_stopped())
    }
}

/// Returns the beginning of an error on one line, without a backtrace.
fn shortened(error: Error) -> Error {
    const MAX_CHARS: usize = 300;
    let text = format!("{error:#}");
    let lines = text.lines().take_while(|line| !matches!(line.trim(), "<backtrace>" | "Stack backtrace:"));
    let text = lines.map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
    Error::msg(text.chars().take(MAX_CHARS).collect::<String>())
}

fn set(logits: &mut [f32], id: u32, to: f32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = to;
    }
}

/// Returns the bytes that each token adds to a text, and none for tokens that a text of a grammar must not have.
fn words(tokenizer: &Tokenizer, n_vocab: usize) -> Result<Vec<Vec<u8>>, TokenizerError> {
    let before = tokenizer.encode("a", SpecialTokens::Exclude)?.pop();
    (0..n_vocab as u32)
        .map(|id| {
            let Some(text) = tokenizer.id_to_token(id) else { return Ok(Vec::new()) };
            if tokenizer.is_special(id) {
                return Ok([&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat());
            }
            let word = added_bytes(tokenizer, before, id)?;
            let is_usable = word.len() <= MAX_TOKEN_BYTES && word.first() != Some(&TokTrie::SPECIAL_TOKEN_MARKER);
            Ok(if is_usable { word } else { Vec::new() })
        })
        .collect()
}

/// Returns the bytes that a token adds to a text that ends with the token `before`. Decoders strip the white space of a first token.
fn added_bytes(tokenizer: &Tokenizer, before: Option<u32>, id: u32) -> Result<Vec<u8>, TokenizerError> {
    let decode = |ids: &[u32]| tokenizer.decode(ids, SpecialTokens::Include);
    if let Some(before) = before
        && let (start, both) = (decode(&[before])?, decode(&[before, id])?)
        && let Some(added) = both.strip_prefix(&start)
        && !added.contains(char::REPLACEMENT_CHARACTER)
    {
        return Ok(added.as_bytes().to_vec());
    }
    tokenizer.token_bytes(id)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn tokens_have_the_bytes_that_they_add_to_a_text() {
        let quickstart = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart/tokenizer");
        let tokenizer = Tokenizer::from_directory(quickstart).unwrap();
        let words = words(&tokenizer, tokenizer.min_embedding_rows() as usize).unwrap();
        for text in ["a wolf  {\"k\": [1,\n 2]}", "na\u{ef}ve \u{1f642}\u{4e2d}"] {
            let ids = tokenizer.encode(text, SpecialTokens::Exclude).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|id| words[*id as usize].clone()).collect();
            assert_eq!(String::from_utf8(bytes).unwrap(), text);
        }
        for id in tokenizer.eos_ids() {
            assert_eq!(words[*id as usize][0], TokTrie::SPECIAL_TOKEN_MARKER);
        }
    }

    #[test]
    fn an_error_is_one_short_line() {
        let error = Error::msg(format!("panic: overflow\n  {}\n<backtrace>\n0: main", "x".repeat(1000)));
        let text = shortened(error).to_string();
        assert!(text.starts_with("panic: overflow; xx") && text.len() == 300 && !text.contains("main"), "{text}");
    }
}
