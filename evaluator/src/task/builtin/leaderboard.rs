//! The Open LLM Leaderboard's variants of GPQA, MMLU-Pro, MuSR and MATH.
//!
//! lm-eval compares answers of MATH with sympy and math-verify. Here answers are equal if their normalized spellings
//! are. That accepts fewer answers, and no wrong ones.

use std::path::Path;
use std::sync::LazyLock;

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use serde_json::{Value as Json, json};

use super::hendrycks_math::{is_equivalent, last_boxed};
use super::{BuiltIn, Doc, ProcessDocs, gpqa, text, texts};
use crate::task::function::PythonFunction;
use crate::task::metric::MetricValue;
use crate::task::python::literal::{literal_eval, literal_prefix};
use crate::task::python::pattern::PythonRegex;
use crate::task::python::text::{is_digit, strip};
use crate::task::response_value::ResponseValue;

pub(super) const BUILT_INS: &[(&str, BuiltIn)] = &[
    ("leaderboard/gpqa/utils.process_docs", BuiltIn::Docs(ProcessDocs::MapWithRng(0, gpqa::without_brackets))),
    ("leaderboard/mmlu_pro/utils.doc_to_text", BuiltIn::Field(lettered)),
    ("leaderboard/mmlu_pro/utils.doc_to_choice", BuiltIn::Field(letters)),
    ("leaderboard/musr/utils.doc_to_text", BuiltIn::Field(story)),
    ("leaderboard/musr/utils.doc_to_choice", BuiltIn::Field(listed)),
    ("leaderboard/math/utils.process_docs", BuiltIn::Docs(ProcessDocs::FilterMap(hard))),
    ("leaderboard/math/utils.doc_to_text", BuiltIn::Field(problem)),
    ("leaderboard/math/utils.process_results", BuiltIn::Results(results)),
    ("leaderboard/math/utils.list_fewshot_samples", BuiltIn::Samples(returned_list)),
];

const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";

fn lettered(doc: &Doc) -> Result<Json, String> {
    let options = texts(doc, "options")?;
    let lines = LETTERS.chars().zip(options).map(|(letter, option)| format!("{letter}. {option}\n"));
    Ok(json!(format!("{}\n{}Answer:", text(doc, "question")?, lines.collect::<String>())))
}

fn letters(doc: &Doc) -> Result<Json, String> {
    let n = texts(doc, "options")?.len();
    Ok(LETTERS.chars().take(n).map(|letter| letter.to_string()).collect())
}

fn listed(doc: &Doc) -> Result<Json, String> {
    literal_eval(text(doc, "choices")?)
}

fn story(doc: &Doc) -> Result<Json, String> {
    let choices = listed(doc)?;
    let choices = choices.as_array().ok_or("the column `choices` is not a list")?;
    let line = |(i, choice): (usize, &Json)| format!("{} - {}\n", i + 1, crate::task::python::repr::str(choice));
    let choices: String = choices.iter().enumerate().map(line).collect();
    Ok(json!(format!("{}\n\n{}\n\n{choices}\nAnswer:", text(doc, "narrative")?, text(doc, "question")?)))
}

const INVALID: &str = "[invalidanswer]";

/// Keeps MATH problems of level 5, with the last boxed answer of the solution.
fn hard(mut doc: Doc) -> Result<Option<Doc>, String> {
    if text(&doc, "level")? != "Level 5" {
        return Ok(None);
    }
    let answer = boxed(text(&doc, "solution")?).unwrap_or_else(|| INVALID.to_owned());
    doc.insert("answer".into(), json!(answer));
    Ok(Some(doc))
}

fn boxed(solution: &str) -> Option<String> {
    let boxed = last_boxed(solution)?;
    let inside = boxed.strip_prefix("\\boxed ").map(str::to_owned);
    inside.or_else(|| Some(boxed.strip_prefix("\\boxed{")?.strip_suffix('}')?.to_owned()))
}

fn problem(doc: &Doc) -> Result<Json, String> {
    Ok(json!(format!("Problem:\n{}\n\nSolution:", text(doc, "problem")?)))
}

fn results(doc: &Doc, answers: &[ResponseValue]) -> Result<Vec<(String, MetricValue)>, String> {
    let said = answers.first().map_or("", ResponseValue::text);
    let gold = text(doc, "answer")?;
    let announced = final_answer(said)?;
    let is_same = |found: &str| -> Result<bool, String> {
        let (found, gold) = (plain_answer(found)?, plain_answer(gold)?);
        Ok(strip(&found) == strip(&gold) || is_equivalent(&found, &gold))
    };
    let is_announced = match &announced {
        Some(found) => is_same(found)?,
        None => false,
    };
    // A boxed answer counts as the final answer, too.
    let is_boxed = match boxed(said) {
        Some(found) => is_same(&found)?,
        None => false,
    };
    let score = |is_right: bool| MetricValue::Count(i64::from(is_right));
    Ok(vec![
        ("exact_match".into(), score(is_announced || is_boxed)),
        ("exact_match_original".into(), score(is_announced)),
    ])
}

/// Returns the answer in the closing sentence of the few-shot examples' format, on one line.
fn final_answer(said: &str) -> Result<Option<String>, String> {
    const END: &str = "I hope it is correct.";
    static SENTENCE: LazyLock<PythonRegex> = LazyLock::new(|| {
        PythonRegex::new("Final Answer: The final answer is(.*?). I hope it is correct.")
            .expect("the pattern is a constant")
    });
    let found = SENTENCE.find_all(&format!("{said}{END}"))?;
    Ok(found.first().and_then(|found| found.groups.first()).map(|answer| strip(answer).to_owned()))
}

/// Replacements that normalize articles, spaces and LaTeX.
const SPELLINGS: [(&str, &str); 10] = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
];

const REMOVED: [&str; 41] = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "ft",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    "\"",
];

type Rewrite = fn(&[String]) -> String;

/// Patterns and replacements that extract the answer from dollars and boxes, and add braces to fractions and roots.
const REWRITTEN: [(&str, Rewrite); 7] = [
    (r"(.*?)(\$)(.*?)(\$)(.*)", |groups| format!("${}$", groups[2])),
    (r"(\\text\{)(.*?)(\})", |groups| groups[1].clone()),
    (r"(\\textbf\{)(.*?)(\})", |groups| groups[1].clone()),
    (r"(\\overline\{)(.*?)(\})", |groups| groups[1].clone()),
    (r"(\\boxed\{)(.*)(\})", |groups| groups[1].clone()),
    (r"(frac)([^{])(.)", |groups| format!("frac{{{}}}{{{}}}", groups[1], groups[2])),
    (r"(sqrt)([^{])", |groups| format!("sqrt{{{}}}", groups[1])),
];

/// Normalizes an answer as Minerva does (Lewkowycz et al. 2022, appendix D).
fn plain_answer(answer: &str) -> Result<String, String> {
    let mut answer = answer.rsplit('=').next().unwrap_or_default().to_owned();
    for (from, to) in SPELLINGS {
        answer = answer.replace(from, to);
    }
    for removed in REMOVED.iter().chain(&["\\dots"]) {
        answer = answer.replace(removed, "");
    }
    for (pattern, by) in REWRITTEN {
        answer = PythonRegex::new(pattern)?.replace(&answer, |found| by(&found.groups))?;
    }
    let answer = answer.replace('$', "");
    let without_commas = answer.replace(',', "");
    Ok(if is_digit(&without_commas) { without_commas } else { answer })
}

/// Returns the literal list that a function of a Python file returns. The file is parsed, not run.
fn returned_list(function: &PythonFunction) -> Result<Vec<Doc>, String> {
    let (path, name) = function.name.rsplit_once('.').ok_or("it names no function")?;
    let path = Path::new(path).with_extension("py");
    let text = read_regular_text_file(&path, MAX_CONFIG_FILE_BYTES)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let body = text.split_once(&format!("def {name}(")).map(|(_, body)| body);
    let list = body.and_then(|body| body.split_once("return ")).map(|(_, list)| list);
    let list = list.ok_or_else(|| format!("{} has no function {name} that returns a list", path.display()))?;
    let docs = literal_prefix(list).ok().and_then(|docs| docs.as_array().cloned()).unwrap_or_default();
    let docs: Option<Vec<Doc>> = docs.iter().map(|doc| doc.as_object().cloned()).collect();
    docs.filter(|docs| !docs.is_empty())
        .ok_or_else(|| format!("{name} in {} does not return a list of documents that is written out", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(said: &str, solution: &str, want: [i64; 2]) {
        let doc = json!({"problem": "p", "solution": solution, "level": "Level 5"});
        let doc = hard(doc.as_object().unwrap().clone()).unwrap().unwrap();
        let found = results(&doc, &[ResponseValue::Text(said.into())]).unwrap();
        assert_eq!(found[0].1, MetricValue::Count(want[0]), "{said}");
        assert_eq!(found[1].1, MetricValue::Count(want[1]), "{said}");
    }

    #[test]
    fn answers_are_found_and_compared() {
        check(
            "Final Answer: The final answer is $\\frac12$. I hope it is correct.",
            "so \\boxed{\\frac{1}{2}}.",
            [1, 1],
        );
        check(
            "Final Answer: The final answer is $x = 1{,}200$ dollars. I hope it is correct.",
            "\\boxed{1,200}",
            [1, 1],
        );
        check("It is \\boxed{7}.", "\\boxed{7}", [1, 0]);
        check("Final Answer: The final answer is $8$. I hope it is correct.", "\\boxed{7}", [0, 0]);
        check("7", "no box at all", [0, 0]);
    }

    #[test]
    fn easier_problems_are_left_out() {
        let doc = json!({"problem": "p", "solution": "\\boxed{1}", "level": "Level 4"});
        assert!(hard(doc.as_object().unwrap().clone()).unwrap().is_none());
    }
}
