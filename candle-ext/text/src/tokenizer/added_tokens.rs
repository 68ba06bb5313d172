//! Search for added tokens in text, with the same results as the tokenizers crate. Most added tokens are special
//! tokens.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::{AddedToken, NormalizedString, Normalizer};

/// Search for added tokens: first in the raw text, then between the matches in the normalized text.
pub(super) struct AddedTokenSearch {
    written: Search,
    normalized: Search,
}

struct Search {
    contents: AhoCorasick,
    ids: Vec<u32>,
}

impl AddedTokenSearch {
    /// Builds the search. `None` if a token strips white space around it or must be a single word.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let (mut written, mut normalized) = (Vec::new(), Vec::new());
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            let AddedToken { single_word: false, lstrip: false, rstrip: false, .. } = token else { return None };
            match (token.normalized, tokenizer.get_normalizer()) {
                (false, _) => written.push((token.content, id)),
                (true, None) => normalized.push((token.content, id)),
                (true, Some(normalizer)) => {
                    let mut content = NormalizedString::from(token.content);
                    normalizer.normalize(&mut content).ok()?;
                    normalized.push((content.get().to_owned(), id));
                }
            }
        }
        Some(Self { written: Search::of(&written)?, normalized: Search::of(&normalized)? })
    }

    /// Splits a normalized text at added tokens. Calls `piece` with each part, and with the token id if it is one.
    pub(super) fn pieces<'t>(
        &self,
        text: &'t str,
        piece: &mut impl FnMut(&'t str, Option<u32>) -> Option<()>,
    ) -> Option<()> {
        self.written.pieces(text, &mut |part, id| match id {
            None => self.normalized.pieces(part, piece),
            Some(_) => piece(part, id),
        })
    }
}

impl Search {
    fn of(tokens: &[(String, u32)]) -> Option<Self> {
        let contents = tokens.iter().map(|(content, _)| content);
        let contents = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(contents).ok()?;
        Some(Self { contents, ids: tokens.iter().map(|(_, id)| *id).collect() })
    }

    fn pieces<'t>(&self, text: &'t str, piece: &mut impl FnMut(&'t str, Option<u32>) -> Option<()>) -> Option<()> {
        let mut start = 0;
        for found in self.contents.find_iter(text) {
            piece(&text[start..found.start()], None)?;
            piece(&text[found.range()], Some(self.ids[found.pattern()]))?;
            start = found.end();
        }
        piece(&text[start..], None)
    }
}
