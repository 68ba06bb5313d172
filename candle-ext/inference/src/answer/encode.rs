//! Tokenization of requests as in lm-eval: special tokens, and whitespace between context and continuation.

use std::path::Path;

use anyhow::{Context, Result};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use candlewick_text::tokenizer::{SpecialToken, SpecialTokens, Tokenizer};
use serde_json::{Map, Value};

/// Tokenizer of requests.
pub struct RequestEncoder<'t> {
    tokenizer: &'t Tokenizer,
    added: SpecialTokensAdded,
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

/// Special tokens added to a text.
#[derive(Clone, Debug)]
enum SpecialTokensAdded {
    /// No special tokens.
    Nothing,
    /// The post-processor of tokenizer.json.
    OfTokenizer,
    /// `add_bos_token` and `add_eos_token` of tokenizer_config.json.
    Tokens { before: Option<u32>, after: Option<u32> },
}

impl<'t> RequestEncoder<'t> {
    /// Creates an encoder from the tokenizer's special-token settings. `add_bos` overrides its BOS setting.
    pub fn new(tokenizer: &'t Tokenizer, add_bos: Option<bool>) -> Result<Self> {
        let config = tokenizer_config(tokenizer.directory())?;
        let of_config = |key: &str| config.get(key).and_then(Value::as_bool);
        let (of_bos, of_eos) = (of_config("add_bos_token"), of_config("add_eos_token"));
        let id = |token: Option<&SpecialToken>, is_added: Option<bool>| {
            token.filter(|_| is_added == Some(true)).map(|token| token.id)
        };
        let added = match add_bos {
            Some(false) => SpecialTokensAdded::Nothing,
            None if of_bos.is_none() && of_eos.is_none() => SpecialTokensAdded::OfTokenizer,
            _ => {
                let (bos, eos) = (tokenizer.bos(), tokenizer.eos());
                SpecialTokensAdded::Tokens { before: id(bos, add_bos.or(of_bos)), after: id(eos, of_eos) }
            }
        };
        Ok(Self { tokenizer, added, prefix: tokenizer.bos().or(tokenizer.eos()).cloned() })
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
        self.encode(text, if is_begun { &SpecialTokensAdded::Nothing } else { &self.added })
    }

    /// Tokenizes a prompt. No special tokens are added if it begins with BOS.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let is_begun = self.tokenizer.bos().is_some_and(|bos| text.starts_with(&bos.text));
        let ids = self.encode(text, if is_begun { &SpecialTokensAdded::Nothing } else { &self.added })?;
        if ids.is_empty() { Ok(vec![self.prefix_token_id()?]) } else { Ok(ids) }
    }

    /// Tokenizes context and continuation as one text, and splits it. Trailing whitespace of the context moves to the
    /// continuation.
    pub fn pair(&self, context: &str, continuation: &str) -> Result<EncodedPair> {
        let pair = if context.is_empty() {
            self.without_context(self.encode(continuation, &SpecialTokensAdded::Nothing)?)?
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

    fn encode(&self, text: &str, added: &SpecialTokensAdded) -> Result<Vec<u32>> {
        Ok(match added {
            SpecialTokensAdded::Nothing => self.tokenizer.encode(text, SpecialTokens::Exclude)?,
            SpecialTokensAdded::OfTokenizer => self.tokenizer.encode(text, SpecialTokens::Include)?,
            SpecialTokensAdded::Tokens { before, after } => {
                let ids = self.tokenizer.encode(text, SpecialTokens::Exclude)?;
                before.iter().copied().chain(ids).chain(*after).collect()
            }
        })
    }
}

/// Returns true for characters that Python's `str.rstrip` strips.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn tokenizer_config(folder: &Path) -> Result<Map<String, Value>> {
    let path = folder.join("tokenizer_config.json");
    if !path.exists() {
        return Ok(Map::new());
    }
    let read =
        || -> Result<_> { Ok(serde_json::from_slice(without_bom(&read_regular_file(&path, MAX_CONFIG_FILE_BYTES)?))?) };
    read().with_context(|| format!("failed to read {}", path.display()))
}
