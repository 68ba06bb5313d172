//! Tokenization of requests as in lm-eval: special tokens, and whitespace between context and continuation.

use anyhow::{Context, Result};
use candlewick_text::tokenizer::{PostProcessorTokens, SpecialToken, SpecialTokens, Tokenizer};

/// Tokenizer of requests.
pub struct RequestEncoder<'t> {
    tokenizer: &'t Tokenizer,
    added: PostProcessorTokens,
    prefix: Option<SpecialToken>,
}

/// A tokenized context with its continuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedPair {
    /// Context, at least one token.
    pub context: Vec<u32>,
    /// Continuation to score, at least one token.
    pub continuation: Vec<u32>,
}

/// Error: a continuation without tokens.
#[derive(Clone, Debug, thiserror::Error)]
#[error("failed to score {continuation:?} after {context:?}: it has no tokens of its own")]
pub struct EmptyContinuation {
    /// Text of the continuation.
    pub continuation: String,
    /// Text of the context.
    pub context: String,
}

/// Error: requests that cannot be scored. No request is processed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub struct UnscorableRequests {
    /// Indices of the requests.
    pub requests: Vec<usize>,
    /// Reason for the first of them.
    pub why: EmptyContinuation,
}

impl<'t> RequestEncoder<'t> {
    /// Creates an encoder that adds the tokenizer's special tokens. `add_bos` replaces them by BOS alone, or by none.
    pub fn new(tokenizer: &'t Tokenizer, add_bos: Option<bool>) -> Self {
        let bos = tokenizer.bos().map(|bos| bos.id);
        let added = match add_bos {
            None => tokenizer.post_processor_tokens().clone(),
            Some(false) => PostProcessorTokens::default(),
            Some(true) => PostProcessorTokens { before: bos.into_iter().collect(), after: Vec::new() },
        };
        Self { tokenizer, added, prefix: tokenizer.bos().or(tokenizer.eos()).cloned() }
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &'t Tokenizer {
        self.tokenizer
    }

    /// Returns the token used as an empty context: BOS, else EOS.
    pub fn prefix_token_id(&self) -> Result<u32> {
        let prefix = self.prefix.as_ref().map(|token| token.id);
        prefix.context("failed to score a text without a context: the tokenizer names neither a BOS nor an EOS token")
    }

    /// Tokenizes a text. No special tokens are added if it begins with the BOS (or EOS) token's text.
    pub fn text(&self, text: &str) -> Result<Vec<u32>> {
        let is_begun = self.prefix.as_ref().is_some_and(|prefix| text.starts_with(&prefix.text));
        if is_begun { self.plain(text) } else { self.surrounded(text) }
    }

    /// Tokenizes a prompt. No special tokens are added if it begins with BOS.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let is_begun = self.tokenizer.bos().is_some_and(|bos| text.starts_with(&bos.text));
        let ids = if is_begun { self.plain(text)? } else { self.surrounded(text)? };
        if ids.is_empty() { Ok(vec![self.prefix_token_id()?]) } else { Ok(ids) }
    }

    /// Tokenizes context and continuation as one text, and splits it. Trailing whitespace of the context moves to the
    /// continuation.
    pub fn pair(&self, context: &str, continuation: &str) -> Result<EncodedPair> {
        let pair = if context.is_empty() {
            self.without_context(self.plain(continuation)?)?
        } else {
            let whole = self.text(&[context, continuation].concat())?;
            let before = self.text(context.trim_end_matches(is_blank))?;
            let continuation = whole.get(before.len()..).unwrap_or_default().to_vec();
            match before.is_empty() {
                true => self.without_context(continuation)?,
                false => EncodedPair { context: before, continuation },
            }
        };
        match pair.continuation.is_empty() {
            true => {
                Err(EmptyContinuation { continuation: continuation.to_owned(), context: context.to_owned() }.into())
            }
            false => Ok(pair),
        }
    }

    /// Scores a text without a context: the BOS (or EOS) token is the context, unless the text begins with it.
    fn without_context(&self, continuation: Vec<u32>) -> Result<EncodedPair> {
        let prefix = self.prefix_token_id()?;
        let context = vec![prefix];
        match continuation.split_first() {
            Some((first, rest)) if *first == prefix => Ok(EncodedPair { context, continuation: rest.to_vec() }),
            _ => Ok(EncodedPair { context, continuation }),
        }
    }

    fn plain(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, SpecialTokens::Exclude)?)
    }

    fn surrounded(&self, text: &str) -> Result<Vec<u32>> {
        let PostProcessorTokens { before, after } = &self.added;
        Ok([before.as_slice(), &self.plain(text)?, after].concat())
    }
}

/// Returns true for characters that Python's `str.rstrip` strips.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}
