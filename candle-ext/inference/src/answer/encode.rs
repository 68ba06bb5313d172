//! From the texts of requests to tokens, as lm-evaluation-harness makes them: where special tokens are added, and whose
//! token a blank between context and continuation is.

use std::path::Path;

use anyhow::{Context, Result};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use candlewick_text::tokenizer::{SpecialToken, SpecialTokens, Tokenizer};
use serde_json::{Map, Value};

/// Makes tokens of requests.
pub struct Encoder<'t> {
    tokenizer: &'t Tokenizer,
    added: Added,
    prefix: Option<SpecialToken>,
}

/// A context and what follows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// At least one token.
    pub context: Vec<u32>,
    /// The tokens that are scored, at least one.
    pub continuation: Vec<u32>,
}

/// There is nothing to score.
#[derive(Clone, Debug, thiserror::Error)]
#[error("failed to score {continuation:?} after {context:?}: it has no tokens of its own")]
pub struct NoTokens {
    /// What was to be scored.
    pub continuation: String,
    /// What stands before.
    pub context: String,
}

/// Some requests cannot be scored, and so none is answered.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub struct Unscorable {
    /// Their numbers.
    pub requests: Vec<usize>,
    /// The reason, of the first of them.
    pub why: NoTokens,
}

/// What is put around a text.
#[derive(Clone, Debug)]
enum Added {
    /// Nothing.
    Nothing,
    /// What tokenizer.json says.
    OfTokenizer,
    /// What tokenizer_config.json says instead.
    Tokens { before: Option<u32>, after: Option<u32> },
}

impl<'t> Encoder<'t> {
    /// Reads what the tokenizer's folder says about special tokens. `add_bos` says something else about the first.
    pub fn new(tokenizer: &'t Tokenizer, add_bos: Option<bool>) -> Result<Self> {
        let config = tokenizer_config(tokenizer.directory())?;
        let of_config = |key: &str| config.get(key).and_then(Value::as_bool);
        let (of_bos, of_eos) = (of_config("add_bos_token"), of_config("add_eos_token"));
        let id = |token: Option<&SpecialToken>, is_added: Option<bool>| {
            token.filter(|_| is_added == Some(true)).map(|token| token.id)
        };
        let added = match add_bos {
            Some(false) => Added::Nothing,
            None if of_bos.is_none() && of_eos.is_none() => Added::OfTokenizer,
            _ => {
                let (bos, eos) = (tokenizer.bos(), tokenizer.eos());
                Added::Tokens { before: id(bos, add_bos.or(of_bos)), after: id(eos, of_eos) }
            }
        };
        Ok(Self { tokenizer, added, prefix: tokenizer.bos().or(tokenizer.eos()).cloned() })
    }

    /// Returns the tokenizer.
    pub fn tokenizer(&self) -> &'t Tokenizer {
        self.tokenizer
    }

    /// The token that stands where no context is: BOS, else EOS.
    pub fn prefix(&self) -> Result<u32> {
        let prefix = self.prefix.as_ref().map(|token| token.id);
        prefix.context("failed to score a text without a context: the tokenizer names neither a BOS nor an EOS token")
    }

    /// The tokens of a text. It gets no special tokens if it begins with the prefix token, written out.
    pub fn text(&self, text: &str) -> Result<Vec<u32>> {
        let is_begun = self.prefix.as_ref().is_some_and(|prefix| text.starts_with(&prefix.text));
        self.encode(text, if is_begun { &Added::Nothing } else { &self.added })
    }

    /// The tokens of a prompt. Only BOS keeps special tokens away.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let is_begun = self.tokenizer.bos().is_some_and(|bos| text.starts_with(&bos.text));
        let ids = self.encode(text, if is_begun { &Added::Nothing } else { &self.added })?;
        if ids.is_empty() { Ok(vec![self.prefix()?]) } else { Ok(ids) }
    }

    /// The tokens of both texts, as of one text. Blanks at the end of the context are the continuation's.
    pub fn pair(&self, context: &str, continuation: &str) -> Result<Pair> {
        let pair = if context.is_empty() {
            self.without_context(self.encode(continuation, &Added::Nothing)?)?
        } else {
            let whole = self.text(&[context, continuation].concat())?;
            let before = self.text(context.trim_end_matches(is_blank))?;
            let continuation = whole.get(before.len()..).unwrap_or_default().to_vec();
            match before.is_empty() {
                true => self.without_context(continuation)?,
                false => Pair { context: before, continuation },
            }
        };
        match pair.continuation.is_empty() {
            true => Err(NoTokens { continuation: continuation.to_owned(), context: context.to_owned() }.into()),
            false => Ok(pair),
        }
    }

    /// The prefix token is the context, unless the text begins with it.
    fn without_context(&self, continuation: Vec<u32>) -> Result<Pair> {
        let prefix = self.prefix()?;
        let context = vec![prefix];
        match continuation.split_first() {
            Some((first, rest)) if *first == prefix => Ok(Pair { context, continuation: rest.to_vec() }),
            _ => Ok(Pair { context, continuation }),
        }
    }

    fn encode(&self, text: &str, added: &Added) -> Result<Vec<u32>> {
        Ok(match added {
            Added::Nothing => self.tokenizer.encode(text, SpecialTokens::Exclude)?,
            Added::OfTokenizer => self.tokenizer.encode(text, SpecialTokens::Include)?,
            Added::Tokens { before, after } => {
                let ids = self.tokenizer.encode(text, SpecialTokens::Exclude)?;
                before.iter().copied().chain(ids).chain(*after).collect()
            }
        })
    }
}

/// What Python's `str.rstrip` takes away.
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
