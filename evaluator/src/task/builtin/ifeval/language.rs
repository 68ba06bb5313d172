//! Language identification with whatlang. lm-eval uses langdetect, which may differ on short texts.

use whatlang::Lang;

/// Result of comparing a text's language with the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LanguageMatch {
    /// The text is in the language.
    Yes,
    /// The text is in another language.
    No,
    /// The language is not detectable; IFEval counts the instruction as followed.
    Undetected,
}

/// Languages of IFEval by ISO 639-1 code.
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

/// Checks whether `text` is in the language `code`. Swahili is never detected, because whatlang does not support it.
pub(super) fn check_language(code: &str, text: &str) -> LanguageMatch {
    let Some(found) = whatlang::detect_lang(text) else { return LanguageMatch::Undetected };
    let wanted = LANGUAGES.iter().find(|(known, _)| *known == code).map(|(_, language)| *language);
    if wanted == Some(found) { LanguageMatch::Yes } else { LanguageMatch::No }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_are_distinguished() {
        let english = "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised.";
        assert_eq!(check_language("en", english), LanguageMatch::Yes);
        assert_eq!(check_language("de", english), LanguageMatch::No);
        assert_eq!(check_language("ko", "안녕하세요, 만나서 반갑습니다. 오늘 날씨가 좋네요."), LanguageMatch::Yes);
        assert_eq!(check_language("en", "123 456"), LanguageMatch::Undetected);
    }
}
