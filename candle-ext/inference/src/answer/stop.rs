//! What ends a generated text: the model's end token, or a text that the task names, wherever token borders are.

use anyhow::Result;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};

/// The ends of one generation.
#[derive(Clone, Debug)]
pub struct Stop {
    until: Vec<String>,
    think_end: Option<ThinkEnd>,
    /// Tokens in which the longest of them has room.
    n_recent: usize,
}

/// What ends a model's thinking: the answer is behind the last of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThinkEnd {
    /// A text.
    Text(String),
    /// A token.
    Id(u32),
}

/// Tokens that may stand for no byte of a text, or for a part of a character.
const SPARE: usize = 8;

impl ThinkEnd {
    /// Reads a token's text, or its number, as lm-eval does.
    pub fn read(word: &str) -> Self {
        word.parse().map_or_else(|_| Self::Text(word.to_owned()), Self::Id)
    }

    /// The text behind the thinking; `None` while it goes on.
    fn behind(&self, generated: &[u32], specials: SpecialTokens, tokenizer: &Tokenizer) -> Result<Option<String>> {
        Ok(match self {
            Self::Id(id) => match generated.iter().rposition(|token| token == id) {
                Some(last) => Some(tokenizer.decode(&generated[last + 1..], specials)?),
                None => None,
            },
            Self::Text(end) => {
                let text = tokenizer.decode(generated, specials)?;
                text.rfind(end.as_str()).map(|at| text[at + end.len()..].to_owned())
            }
        })
    }
}

impl Stop {
    /// Stops at these texts, and at that of EOS; only behind the thinking, if there is some.
    pub fn new(until: &[String], think_end: Option<ThinkEnd>, tokenizer: &Tokenizer) -> Self {
        let mut until = until.to_vec();
        if let Some(eos) = tokenizer.eos().filter(|eos| !until.contains(&eos.text)) {
            until.push(eos.text.clone());
        }
        let n_recent = until.iter().map(String::len).max().unwrap_or(0) + SPARE;
        Self { until, think_end, n_recent }
    }

    /// Tells whether a generation ends with its newest token.
    pub fn ends(&self, generated: &[u32], tokenizer: &Tokenizer) -> Result<bool> {
        let Some(newest) = generated.last() else { return Ok(false) };
        if tokenizer.eos_ids().contains(newest) {
            return Ok(true);
        }
        let recent = &generated[generated.len().saturating_sub(self.n_recent)..];
        let holds_a_stop = |text: &str| self.until.iter().any(|stop| text.contains(stop.as_str()));
        // Special tokens written out: a stop may be one.
        let has_stopped = holds_a_stop(&tokenizer.decode(recent, SpecialTokens::Include)?);
        match &self.think_end {
            Some(end) if has_stopped => {
                Ok(end.behind(generated, SpecialTokens::Include, tokenizer)?.is_some_and(|text| holds_a_stop(&text)))
            }
            _ => Ok(has_stopped),
        }
    }

    /// The text of a generation, without special tokens, without thinking, and cut before the first of each stop, one stop after
    /// the other.
    pub fn text(&self, generated: &[u32], tokenizer: &Tokenizer) -> Result<String> {
        let mut text = match &self.think_end {
            None => tokenizer.decode(generated, SpecialTokens::Exclude)?,
            Some(end) => {
                let behind = end.behind(generated, SpecialTokens::Exclude, tokenizer)?;
                let text = behind.map_or_else(|| tokenizer.decode(generated, SpecialTokens::Exclude), Ok)?;
                text.trim_start().to_owned()
            }
        };
        for stop in self.until.iter().filter(|stop| !stop.is_empty()) {
            if let Some(at) = text.find(stop.as_str()) {
                text.truncate(at);
            }
        }
        Ok(text)
    }
}
