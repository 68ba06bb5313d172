//! What words become, remembered.

use std::collections::HashMap;

use compact_str::CompactString;
use foldhash::fast::RandomState;

/// ByteLevelBpe that are remembered at a time: then all are forgotten, and those of the texts at hand are learned anew.
const MOST: usize = 1 << 17;
/// A longer word, in bytes, hardly comes back.
const LONGEST: usize = 128;

/// One token of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) id: u32,
    /// The bytes of the word that it stands for.
    pub(super) start: u32,
    pub(super) end: u32,
}

/// A word's tokens. Most words have one, and stand in the table with it: what is looked up lies in one place.
enum Tokens {
    One(Token),
    Several(Box<[Token]>),
}

/// The words of one thread.
#[derive(Default)]
pub(super) struct WordCache {
    words: HashMap<CompactString, Tokens, RandomState>,
}

impl WordCache {
    pub(super) fn get(&self, word: &str) -> Option<&[Token]> {
        Some(match self.words.get(word)? {
            Tokens::One(token) => std::slice::from_ref(token),
            Tokens::Several(tokens) => tokens,
        })
    }

    pub(super) fn learn(&mut self, word: &str, tokens: &[Token]) {
        if word.len() > LONGEST {
            return;
        }
        if self.words.len() == MOST {
            self.words.clear();
        }
        let tokens = match tokens {
            [one] => Tokens::One(*one),
            several => Tokens::Several(several.into()),
        };
        self.words.insert(word.into(), tokens);
    }
}
