//! What ends a generated text: the model's end token, or a text that the task names, wherever token borders are.

use anyhow::Result;
use candlewick_text::tokenizer::{Specials, Tokenizer};

/// The ends of one generation.
#[derive(Clone, Debug)]
pub struct Stop {
    until: Vec<String>,
    /// Tokens in which the longest of them has room.
    n_recent: usize,
}

/// Tokens that may stand for no byte of a text, or for a part of a character.
const SPARE: usize = 8;

impl Stop {
    /// Stops at these texts, and at that of EOS.
    pub fn new(until: &[String], tokenizer: &Tokenizer) -> Self {
        let mut until = until.to_vec();
        if let Some(eos) = tokenizer.eos().filter(|eos| !until.contains(&eos.text)) {
            until.push(eos.text.clone());
        }
        let n_recent = until.iter().map(String::len).max().unwrap_or(0) + SPARE;
        Self { until, n_recent }
    }

    /// Tells whether a generation ends with its newest token.
    pub fn ends(&self, generated: &[u32], tokenizer: &Tokenizer) -> Result<bool> {
        let Some(newest) = generated.last() else { return Ok(false) };
        if tokenizer.eos_ids().contains(newest) {
            return Ok(true);
        }
        let recent = &generated[generated.len().saturating_sub(self.n_recent)..];
        // Special tokens written out: a stop may be one.
        let text = tokenizer.decode(recent, Specials::Add)?;
        Ok(self.until.iter().any(|stop| text.contains(stop.as_str())))
    }

    /// The text of a generation, without special tokens and cut before the first of each stop, one stop after the other.
    pub fn text(&self, generated: &[u32], tokenizer: &Tokenizer) -> Result<String> {
        let mut text = tokenizer.decode(generated, Specials::Omit)?;
        for stop in self.until.iter().filter(|stop| !stop.is_empty()) {
            if let Some(at) = text.find(stop.as_str()) {
                text.truncate(at);
            }
        }
        Ok(text)
    }
}
