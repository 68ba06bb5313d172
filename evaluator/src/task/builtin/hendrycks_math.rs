//! MATH: the last boxed answer, and whether two answers in LaTeX are the same once their spelling is evened out.

use serde_json::json;

use super::{BuiltIn, Doc, ProcessDocs, text};
use crate::task::metric::MetricValue;
use crate::task::python::text::is_digit;
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("hendrycks_math/utils.process_docs", BuiltIn::Docs(ProcessDocs::Each(process))),
    ("hendrycks_math/utils.process_results", BuiltIn::Results(results)),
];

fn process(mut doc: Doc) -> Result<Doc, String> {
    let answer = boxed_answer(text(&doc, "solution")?)?;
    doc.insert("answer".into(), json!(answer));
    Ok(doc)
}

fn results(doc: &Doc, answers: &[ResponseValue]) -> Result<Vec<(String, MetricValue)>, String> {
    let said = answers.first().map_or("", ResponseValue::text);
    let is_right = is_equivalent(between_dollars(said), &boxed_answer(text(doc, "solution")?)?);
    Ok(vec![("exact_match".into(), MetricValue::Count(i64::from(is_right)))])
}

/// What stands between the first and the last dollar sign; the whole if there are not two.
fn between_dollars(text: &str) -> &str {
    match (text.find('$'), text.rfind('$')) {
        (Some(first), Some(last)) if first < last => &text[first + 1..last],
        _ => text,
    }
}

fn boxed_answer(solution: &str) -> Result<String, String> {
    let boxed = last_boxed(solution).ok_or("the solution has no boxed answer")?;
    if let Some(answer) = boxed.strip_prefix("\\boxed ") {
        return Ok(answer.to_owned());
    }
    let inside = boxed.strip_prefix("\\boxed{").and_then(|rest| rest.strip_suffix('}'));
    inside.map(str::to_owned).ok_or_else(|| format!("{boxed:?} is not a boxed answer"))
}

/// The last `\boxed{...}` or `\fbox{...}`, up to the brace that closes it.
pub(super) fn last_boxed(text: &str) -> Option<String> {
    if text.contains("\\boxed ") {
        let tail = text.rsplit("\\boxed ").next().unwrap_or_default();
        return Some(format!("\\boxed {}", tail.split('$').next().unwrap_or_default()));
    }
    let start = text.rfind("\\boxed").or_else(|| text.rfind("\\fbox"))?;
    let mut depth = 0;
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return Some(text[start..=start + at].to_owned());
        }
    }
    None
}

/// Whether two answers are spelt the same once evened out; as they stand if one of them cannot be.
pub(super) fn is_equivalent(one: &str, other: &str) -> bool {
    match (even_out(one), even_out(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

const SPELLINGS: [(&str, &str); 10] = [
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
];

/// One spelling for each of many answers. `None` where the reference implementation gives up.
fn even_out(text: &str) -> Option<String> {
    let mut text = text.to_owned();
    for (from, to) in SPELLINGS {
        text = text.replace(from, to);
    }
    text = without_units(&text)?;
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.");
    if text.is_empty() {
        return Some(text);
    }
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    if let [name, value] = text.split('=').collect::<Vec<_>>()[..]
        && name.chars().count() <= 2
    {
        text = value.to_owned();
    }
    text = braced_roots(&text)?.replace(' ', "");
    text = braced_fractions(&text)?;
    if text == "0.5" {
        text = "\\frac{1}{2}".into();
    }
    slash_as_fraction(text)
}

/// Without the `\text{ ...}` at the right, which holds a unit; two of them are too many.
fn without_units(text: &str) -> Option<String> {
    let parts: Vec<&str> = text.split("\\text{ ").collect();
    (parts.len() <= 2).then(|| parts[0].to_owned())
}

/// `\sqrt3` as `\sqrt{3}`.
fn braced_roots(text: &str) -> Option<String> {
    let mut parts = text.split("\\sqrt");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let first = part.chars().next()?;
        match first {
            '{' => out += &format!("\\sqrt{part}"),
            _ => out += &format!("\\sqrt{{{first}}}{}", &part[first.len_utf8()..]),
        }
    }
    Some(out)
}

/// `\frac12` as `\frac{1}{2}`, `\frac1{72}` as `\frac{1}{72}`.
fn braced_fractions(text: &str) -> Option<String> {
    let mut parts = text.split("\\frac");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let mut chars = part.chars();
        let first = chars.next()?;
        if first == '{' {
            out += &format!("\\frac{part}");
            continue;
        }
        let Some(second) = chars.next() else { return Some(text.to_owned()) };
        let rest = chars.as_str();
        match second {
            '{' => out += &format!("\\frac{{{first}}}{{{rest}"),
            _ => out += &format!("\\frac{{{first}}}{{{second}}}{rest}"),
        }
    }
    Some(out)
}

/// `3/4` as a fraction, if both sides are plain integers. `None` if one of them is no integer at all.
fn slash_as_fraction(text: String) -> Option<String> {
    let [above, below] = text.split('/').collect::<Vec<_>>()[..] else { return Some(text) };
    let (above, below) = (integer(above)?, integer(below)?);
    Some(if text == format!("{above}/{below}") { format!("\\frac{{{above}}}{{{below}}}") } else { text })
}

/// Python's `int(text)`, canonically written.
fn integer(text: &str) -> Option<String> {
    let text = text.trim();
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_number = !digits.is_empty() && digits.split('_').all(is_digit);
    let digits = digits.replace('_', "");
    let digits = digits.trim_start_matches('0');
    let sign = if text.starts_with('-') && !digits.is_empty() { "-" } else { "" };
    is_number.then(|| format!("{sign}{}", if digits.is_empty() { "0" } else { digits }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn same(one: &str, other: &str, want: bool) {
        assert_eq!(is_equivalent(one, other), want, "{one:?} {other:?}");
    }

    // Each row is what lm-eval's `is_equiv` says.
    #[test]
    fn spellings_are_evened_out() {
        same("\\frac12", "\\dfrac{1}{2}", true);
        same("0.5", ".5", true);
        same("1/2", "0.5", true);
        same("x = 3", "3", true);
        same("10\\text{ cm}", "10", true);
        same("\\sqrt3", "\\sqrt{3}", true);
        same("50\\%", "50", true);
        same("a/b", "a / b", false);
        same("\\frac", "\\frac", true);
        same("90^\\circ", "90", true);
        same("\\left(1, 2\\right)", "(1,2)", true);
    }

    #[test]
    fn the_last_box_is_the_answer() {
        assert_eq!(boxed_answer("so $\\boxed{1}$ or $\\boxed{\\frac{1}{2}}$.").as_deref(), Ok("\\frac{1}{2}"));
        assert_eq!(boxed_answer("so $\\boxed 7$.").as_deref(), Ok("7"));
        assert!(boxed_answer("none").is_err());
    }
}
