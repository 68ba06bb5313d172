//! Filters that choose among several answers to one request.

use serde_json::{Map, Value as Json};

use super::Filter;
use crate::task::error::ConfigError;
use crate::task::keys::YamlMap;
use crate::task::response_value::ResponseValue;

/// Takes the first answer.
#[derive(Debug)]
pub(crate) struct TakeFirst;

/// Keeps the first k answers.
#[derive(Debug)]
pub(super) struct TakeFirstK {
    k: usize,
}

/// Keeps the answer that is there most often, of several such the first.
#[derive(Debug)]
pub(super) struct MajorityVote;

impl Filter for TakeFirst {
    fn apply(&self, answers: ResponseValue, _: &Map<String, Json>) -> Result<ResponseValue, String> {
        match answers {
            ResponseValue::Many(answers) => {
                answers.into_iter().next().ok_or_else(|| "there is no answer to take".into())
            }
            _ => Err("take_first stands twice".into()),
        }
    }
}

impl TakeFirstK {
    pub(super) fn read(keys: &YamlMap) -> Result<Self, ConfigError> {
        keys.only(&["function", "k"])?;
        let k = keys.count("k")?.filter(|k| *k > 0);
        Ok(Self { k: k.ok_or_else(|| keys.fault("the filter take_first_k needs the key `k`, from 1 on"))? })
    }
}

impl Filter for TakeFirstK {
    fn apply(&self, answers: ResponseValue, _: &Map<String, Json>) -> Result<ResponseValue, String> {
        let ResponseValue::Many(mut answers) = answers else {
            return Err("take_first_k stands behind take_first".into());
        };
        if answers.len() < self.k {
            return Err(format!(
                "{} answers a document are too few for the first {}; raise repeats",
                answers.len(),
                self.k
            ));
        }
        answers.truncate(self.k);
        Ok(ResponseValue::Many(answers))
    }
}

impl Filter for MajorityVote {
    fn apply(&self, answers: ResponseValue, _: &Map<String, Json>) -> Result<ResponseValue, String> {
        let ResponseValue::Many(answers) = answers else { return Err("majority_vote stands behind take_first".into()) };
        let votes = |answer: &ResponseValue| answers.iter().filter(|other| *other == answer).count();
        let most = answers.iter().map(votes).max().ok_or("there is no answer to vote for")?;
        let winner = answers.iter().find(|answer| votes(answer) == most).cloned();
        Ok(ResponseValue::Many(winner.into_iter().collect()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn texts(texts: &[&str]) -> ResponseValue {
        ResponseValue::Many(texts.iter().map(|text| ResponseValue::Text((*text).into())).collect())
    }

    #[test]
    fn a_tie_goes_to_the_first() {
        let doc = Map::new();
        assert_eq!(MajorityVote.apply(texts(&["b", "a", "a", "b", "c"]), &doc).unwrap(), texts(&["b"]));
        assert_eq!(MajorityVote.apply(texts(&["b", "a", "a"]), &doc).unwrap(), texts(&["a"]));
    }

    #[test]
    fn too_few_answers_say_what_to_raise() {
        let error = TakeFirstK { k: 3 }.apply(texts(&["a"]), &Map::new()).unwrap_err();
        assert!(error.contains("raise repeats"), "{error}");
        assert_eq!(TakeFirstK { k: 1 }.apply(texts(&["a", "b"]), &Map::new()).unwrap(), texts(&["a"]));
    }
}
