//! Cache of the tokens of words.

use std::collections::HashMap;

use compact_str::CompactString;
use foldhash::fast::RandomState;

/// Largest number of cached words. A full cache is cleared.
const MOST: usize = 1 << 17;
/// Length limit of a cached word, in bytes. Longer words rarely repeat.
const LONGEST: usize = 128;

/// Token of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WordToken {
    pub(super) id: u32,
    /// Byte range within the word.
    pub(super) start: u32,
    pub(super) end: u32,
}

/// Tokens of a word. Most words have one, which is stored inline to save a memory access.
enum Tokens {
    One(WordToken),
    Several(Box<[WordToken]>),
}

/// Word cache of one thread.
#[derive(Default)]
pub(super) struct WordCache {
    words: HashMap<CompactString, Tokens, RandomState>,
}

impl WordCache {
    pub(super) fn get(&self, word: &str) -> Option<&[WordToken]> {
        Some(match self.words.get(word)? {
            Tokens::One(token) => std::slice::from_ref(token),
            Tokens::Several(tokens) => tokens,
        })
    }

    pub(super) fn learn(&mut self, word: &str, tokens: &[WordToken]) {
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
