//! How a byte-level tokenizer cuts a text into words, without the tokenizers crate's bookkeeping of every character.

use regex_automata::meta::{Cache, Regex};
use regex_automata::util::syntax::parse;
use regex_automata::{Anchored, Input};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;

/// What GPT-2 cuts at, and what `ByteLevel` does unless it is told not to.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// How these patterns end: white space before a word leaves its last character to the word.
const WHITE_SPACE: &str = r"|\s+(?!\S)|\s+";

/// One cut. Nothing of the text is lost.
pub(super) enum SplitRule {
    /// Each match and all between two matches.
    Pattern(Pattern),
    /// Each digit, and all between two digits.
    Digits,
    /// Runs of digits, and all between them.
    Numbers,
}

/// A pattern without look-around: its one look ahead is done by hand.
pub(super) struct Pattern {
    regex: Regex,
}

/// Matches of this part of a pattern are white space that may have to leave its last character.
const RUN: usize = 1;

impl SplitRule {
    /// The cuts of a byte-level pre-tokenizer. `None`: it is another one, or does something else as well.
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

    /// What a search writes to. A thread has its own.
    pub(super) fn cache(&self) -> Option<Cache> {
        match self {
            Self::Pattern(pattern) => Some(pattern.regex.create_cache()),
            Self::Digits | Self::Numbers => None,
        }
    }

    /// The end of the piece that begins at `start`, which is within the text.
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

/// Hands out the words of a text, in order.
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
    /// `None`: the pattern looks around in another way than [`WHITE_SPACE`], is possessive, or matches nothing at all.
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
        // Matches stand behind one another but for rare gaps: the end is all there is to find.
        if let Some(found) = self.regex.search_half_with(cache, &input.clone().anchored(Anchored::Yes)) {
            let is_run = found.pattern().as_usize() == RUN;
            return if is_run { end_of_run(text, start, found.offset()) } else { found.offset() };
        }
        self.regex.search_with(cache, &input).map_or(text.len(), |next| next.start())
    }
}

/// `\s+(?!\S)|\s+`: all of the run at a text's end, else all but its last character, else that character.
fn end_of_run(text: &str, start: usize, end: usize) -> usize {
    let n_last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
    if end == text.len() || start + n_last == end { end } else { end - n_last }
}

/// Whether a repetition is followed by `+`, which forbids going back in one dialect and is a second repetition in another.
fn is_possessive(pattern: &str) -> bool {
    pattern.match_indices('+').any(|(at, _)| {
        let before = &pattern[..at];
        let counted = before.ends_with('}') && before.rfind('{').is_some_and(|open| !is_property(&before[..open]));
        before.ends_with(['?', '*', '+']) || counted
    })
}

/// Whether a brace opens the name of a property: `\p{L}`.
fn is_property(before_brace: &str) -> bool {
    before_brace.ends_with(r"\p") || before_brace.ends_with(r"\P")
}
