//! Which language a text is in. lm-eval asks langdetect; this asks whatlang, and may answer otherwise for short texts.

use whatlang::Lang;

/// Whether a text is in a language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LanguageMatch {
    /// It is.
    Yes,
    /// It is in another.
    No,
    /// There is nothing in it that tells; IFEval counts that as followed.
    Untold,
}

/// The languages of IFEval by their codes of two letters.
const LANGUAGES: [(&str, Lang); 29] = [
    ("en", Lang::Eng),
    ("es", Lang::Spa),
    ("pt", Lang::Por),
    ("ar", Lang::Ara),
    ("hi", Lang::Hin),
    ("fr", Lang::Fra),
    ("ru", Lang::Rus),
    ("de", Lang::Deu),
    ("ja", Lang::Jpn),
    ("it", Lang::Ita),
    ("bn", Lang::Ben),
    ("uk", Lang::Ukr),
    ("th", Lang::Tha),
    ("ur", Lang::Urd),
    ("ta", Lang::Tam),
    ("te", Lang::Tel),
    ("bg", Lang::Bul),
    ("ko", Lang::Kor),
    ("pl", Lang::Pol),
    ("he", Lang::Heb),
    ("fa", Lang::Pes),
    ("vi", Lang::Vie),
    ("ne", Lang::Nep),
    ("kn", Lang::Kan),
    ("mr", Lang::Mar),
    ("gu", Lang::Guj),
    ("pa", Lang::Pan),
    ("ml", Lang::Mal),
    ("fi", Lang::Fin),
];

/// Whether `text` is in the language of this code. Swahili, which whatlang does not know, is never found.
pub(super) fn is_in(code: &str, text: &str) -> LanguageMatch {
    let Some(found) = whatlang::detect_lang(text) else { return LanguageMatch::Untold };
    let wanted = LANGUAGES.iter().find(|(known, _)| *known == code).map(|(_, language)| *language);
    if wanted == Some(found) { LanguageMatch::Yes } else { LanguageMatch::No }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_are_told_apart() {
        let english = "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised.";
        assert_eq!(is_in("en", english), LanguageMatch::Yes);
        assert_eq!(is_in("de", english), LanguageMatch::No);
        assert_eq!(is_in("ko", "안녕하세요, 만나서 반갑습니다. 오늘 날씨가 좋네요."), LanguageMatch::Yes);
        assert_eq!(is_in("en", "123 456"), LanguageMatch::Untold);
    }
}
