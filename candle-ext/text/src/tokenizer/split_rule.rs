//! Pre-tokenization of byte-level tokenizers, without the per-character bookkeeping of the tokenizers crate.

use regex_automata::meta::{Cache, Regex};
use regex_automata::util::syntax::parse;
use regex_automata::{Anchored, Input};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;

/// Split pattern of GPT-2, the default of `ByteLevel`.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// End of these patterns: white space before a word leaves its last character to the word.
const WHITE_SPACE: &str = r"|\s+(?!\S)|\s+";

/// One pre-tokenization step. It keeps every character of the text.
pub(super) enum SplitRule {
    /// Splits around each match of a pattern.
    Pattern(Pattern),
    /// Splits around each digit.
    Digits,
    /// Splits around each run of digits.
    Numbers,
}

/// Split pattern without look-around. Its one look-ahead is implemented by hand.
pub(super) struct Pattern {
    regex: Regex,
}

/// Index of the white space part of a pattern, whose match may leave its last character.
const RUN: usize = 1;

impl SplitRule {
    /// Returns the steps of a byte-level pre-tokenizer. `None` for any other pre-tokenizer.
    pub(super) fn all_of(pre_tokenizer: &PreTokenizerWrapper) -> Option<Vec<Self>> {
        let steps = match pre_tokenizer {
            PreTokenizerWrapper::Sequence(sequence) => sequence.as_ref(),
            one => std::slice::from_ref(one),
        };
        let (PreTokenizerWrapper::ByteLevel(bytes), before) = steps.split_last()? else { return None };
        if bytes.add_prefix_space {
            return None;
        }
        let mut cuts = before.iter().map(Self::of).collect::<Option<Vec<_>>>()?;
        if bytes.use_regex {
            cuts.push(Self::Pattern(Pattern::new(GPT2)?));
        }
        Some(cuts)
    }

    fn of(step: &PreTokenizerWrapper) -> Option<Self> {
        match step {
            PreTokenizerWrapper::Digits(digits) if digits.individual_digits => Some(Self::Digits),
            PreTokenizerWrapper::Digits(_) => Some(Self::Numbers),
            PreTokenizerWrapper::Split(split) if split.behavior == SplitDelimiterBehavior::Isolated => {
                match &split.pattern {
                    SplitPattern::Regex(pattern) => Some(Self::Pattern(Pattern::new(pattern)?)),
                    SplitPattern::String(_) => None,
                }
            }
            _ => None,
        }
    }

    /// Creates the scratch memory of a search. Each thread has its own.
    pub(super) fn cache(&self) -> Option<Cache> {
        match self {
            Self::Pattern(pattern) => Some(pattern.regex.create_cache()),
            Self::Digits | Self::Numbers => None,
        }
    }

    /// Returns the end of the piece that begins at byte `start`.
    fn end(&self, cache: &mut Option<Cache>, text: &str, start: usize) -> usize {
        let rest = &text[start..];
        let is_digit = rest.starts_with(char::is_numeric);
        let n_bytes = match (self, cache) {
            (Self::Pattern(pattern), Some(cache)) => return pattern.end(cache, text, start),
            (Self::Digits, _) if is_digit => rest.chars().next().map(char::len_utf8),
            _ if is_digit => rest.find(|c: char| !c.is_numeric()),
            _ => rest.find(char::is_numeric),
        };
        n_bytes.map_or(text.len(), |n_bytes| start + n_bytes)
    }
}

/// Calls `word` with each word of a text, in order.
pub(super) fn words<'t>(
    cuts: &[SplitRule],
    caches: &mut [Option<Cache>],
    text: &'t str,
    word: &mut dyn FnMut(&'t str) -> Option<()>,
) -> Option<()> {
    let (Some((cut, cuts)), Some((cache, caches))) = (cuts.split_first(), caches.split_first_mut()) else {
        return word(text);
    };
    let mut start = 0;
    while start < text.len() {
        let end = cut.end(cache, text, start);
        words(cuts, caches, &text[start..end], word)?;
        start = end;
    }
    Some(())
}

impl Pattern {
    /// Compiles a pattern. `None` for other look-around than [`WHITE_SPACE`], possessive quantifiers and empty
    /// matches.
    fn new(pattern: &str) -> Option<Self> {
        let (rest, parts) = match pattern.strip_suffix(WHITE_SPACE) {
            Some(rest) => (rest, vec![rest, r"\s+"]),
            None => (pattern, vec![pattern]),
        };
        let syntax = parse(rest).ok()?;
        let is_plain = syntax.properties().minimum_len() > Some(0) && syntax.properties().look_set().is_empty();
        (is_plain && !is_possessive(rest)).then_some(Self { regex: Regex::new_many(&parts).ok()? })
    }

    fn end(&self, cache: &mut Cache, text: &str, start: usize) -> usize {
        let input = Input::new(text).range(start..);
        // Matches are nearly always adjacent, so finding the end suffices.
        if let Some(found) = self.regex.search_half_with(cache, &input.clone().anchored(Anchored::Yes)) {
            let is_run = found.pattern().as_usize() == RUN;
            return if is_run { end_of_run(text, start, found.offset()) } else { found.offset() };
        }
        self.regex.search_with(cache, &input).map_or(text.len(), |next| next.start())
    }
}

/// Implements `\s+(?!\S)|\s+`: the whole run at the end of a text, else all but its last character, if more than
/// one.
fn end_of_run(text: &str, start: usize, end: usize) -> usize {
    let n_last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
    if end == text.len() || start + n_last == end { end } else { end - n_last }
}

/// Returns true if a quantifier is followed by `+`. That means possessive in one regex dialect and repetition in
/// another.
fn is_possessive(pattern: &str) -> bool {
    pattern.match_indices('+').any(|(at, _)| {
        let before = &pattern[..at];
        let counted = before.ends_with('}') && before.rfind('{').is_some_and(|open| !is_property(&before[..open]));
        before.ends_with(['?', '*', '+']) || counted
    })
}

/// Returns true if a brace opens the name of a property: `\p{L}`.
fn is_property(before_brace: &str) -> bool {
    before_brace.ends_with(r"\p") || before_brace.ends_with(r"\P")
}
