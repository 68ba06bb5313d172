//! Stop criteria of a generation: EOS and stop strings, which may span tokens.

use anyhow::Result;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};

/// Stop criteria of one generation.
#[derive(Clone, Debug)]
pub struct StopCriteria {
    until: Vec<String>,
    think_end: Option<ThinkEnd>,
    /// Number of recent tokens that cover the longest stop string.
    n_recent: usize,
}

/// End of thinking: the response follows its last occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThinkEnd {
    /// A string.
    Text(String),
    /// A token id.
    Id(u32),
}

/// Spare tokens, which may decode to no character or part of one.
const SPARE: usize = 8;

impl ThinkEnd {
    /// Parses a string or a token id, as lm-eval's `think_end_token`.
    pub fn read(word: &str) -> Self {
        word.parse().map_or_else(|_| Self::Text(word.to_owned()), Self::Id)
    }

    /// Returns the text after the thinking; `None` if the thinking has not ended.
    fn text_after(&self, generated: &[u32], specials: SpecialTokens, tokenizer: &Tokenizer) -> Result<Option<String>> {
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

impl StopCriteria {
    /// Creates stop criteria of `until` and EOS, which apply after the thinking only.
    pub fn new(until: &[String], think_end: Option<ThinkEnd>, tokenizer: &Tokenizer) -> Self {
        let mut until = until.to_vec();
        if let Some(eos) = tokenizer.eos().filter(|eos| !until.contains(&eos.text)) {
            until.push(eos.text.clone());
        }
        let n_recent = until.iter().map(String::len).max().unwrap_or(0) + SPARE;
        Self { until, think_end, n_recent }
    }

    /// Returns true if the newest token ends the generation.
    pub fn ends(&self, generated: &[u32], tokenizer: &Tokenizer) -> Result<bool> {
        let Some(newest) = generated.last() else { return Ok(false) };
        if tokenizer.eos_ids().contains(newest) {
            return Ok(true);
        }
        let recent = &generated[generated.len().saturating_sub(self.n_recent)..];
        let holds_a_stop = |text: &str| self.until.iter().any(|stop| text.contains(stop.as_str()));
        // Special tokens are decoded as text: a stop string may be one.
        let has_stopped = holds_a_stop(&tokenizer.decode(recent, SpecialTokens::Include)?);
        match &self.think_end {
            Some(end) if has_stopped => Ok(end
                .text_after(generated, SpecialTokens::Include, tokenizer)?
                .is_some_and(|text| holds_a_stop(&text))),
            _ => Ok(has_stopped),
        }
    }

    /// Returns the generated text without special tokens and thinking, truncated at the first occurrence of each stop
    /// string.
    pub fn text(&self, generated: &[u32], tokenizer: &Tokenizer) -> Result<String> {
        let mut text = match &self.think_end {
            None => tokenizer.decode(generated, SpecialTokens::Exclude)?,
            Some(end) => {
                let after = end.text_after(generated, SpecialTokens::Exclude, tokenizer)?;
                let text = after.map_or_else(|| tokenizer.decode(generated, SpecialTokens::Exclude), Ok)?;
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
