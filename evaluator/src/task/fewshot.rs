//! Which examples stand before a question.
//!
//! By default the choice depends on the seed, the task and the document, so that no number of ranks and no order changes a
//! prompt. lm-eval draws all choices of a task from one stream; `Draws::Stream` reproduces it.

use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::mersenne::Random;
use super::native::Doc;

/// The examples that there are, and how they are chosen.
pub(crate) struct Sampler<'a> {
    /// What is chosen from.
    pub(crate) docs: &'a [Doc],
    /// Whether the first are taken instead of random ones.
    pub(crate) is_first_n: bool,
    /// Whether a document may be among its own examples, so that it has to be left out.
    pub(crate) leaves_out: bool,
}

/// Where random choices come from.
pub(crate) enum Draws<'a> {
    /// From one stream for all documents, in their order.
    Stream(Box<Random>),
    /// From a stream for each document.
    Keyed {
        /// The user's seed.
        seed: u64,
        /// The task's name.
        task: &'a str,
    },
}

impl Sampler<'_> {
    /// Chooses `n` examples for document `doc_id`.
    pub(crate) fn sample(&self, draws: &mut Draws, n: usize, doc_id: usize, doc: &Doc) -> Result<Vec<&Doc>, String> {
        let others = || self.docs.iter().filter(|other| !self.leaves_out || *other != doc).collect::<Vec<&Doc>>();
        if self.is_first_n {
            let mut pool = others();
            return enough(n, pool.len()).map(|()| {
                pool.truncate(n);
                pool
            });
        }
        match draws {
            Draws::Stream(random) => self.drawn_from_stream(random, n, doc, others),
            Draws::Keyed { seed, task } => pick(&others(), n, &mut keyed(*seed, task, doc_id)),
        }
    }

    /// lm-eval draws one more than it needs, and draws anew from the others if the document came more than once.
    fn drawn_from_stream<'a>(
        &'a self,
        random: &mut Random,
        n: usize,
        doc: &Doc,
        others: impl Fn() -> Vec<&'a Doc>,
    ) -> Result<Vec<&'a Doc>, String> {
        let all: Vec<&Doc> = self.docs.iter().collect();
        if !self.leaves_out {
            return pick(&all, n, random);
        }
        let mut drawn = pick(&all, n + 1, random)?;
        drawn.retain(|other| *other != doc);
        drawn.truncate(n);
        if drawn.len() < n { pick(&others(), n, random) } else { Ok(drawn) }
    }
}

fn pick<'a>(docs: &[&'a Doc], n: usize, random: &mut Random) -> Result<Vec<&'a Doc>, String> {
    enough(n, docs.len())?;
    let drawn = random.sample(docs.len(), n).unwrap_or_default();
    Ok(drawn.into_iter().map(|at| docs[at]).collect())
}

fn enough(n: usize, n_docs: usize) -> Result<(), String> {
    if n <= n_docs { Ok(()) } else { Err(format!("{n} examples are wanted, but there are only {n_docs}")) }
}

/// A stream of its own for a seed, a task and a document.
fn keyed(seed: u64, task: &str, doc_id: usize) -> Random {
    let hash = Sha256::digest(Json::from(vec![Json::from(seed), task.into(), doc_id.into()]).to_string());
    let words: Vec<u32> =
        hash.chunks_exact(4).map(|bytes| bytes.iter().fold(0, |word, b| word << 8 | u32::from(*b))).collect();
    Random::from_key(&words)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn docs(names: &[&str]) -> Vec<Doc> {
        names.iter().map(|name| json!({"q": name}).as_object().unwrap().clone()).collect()
    }

    fn names(docs: &[&Doc]) -> Vec<String> {
        docs.iter().map(|doc| doc["q"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn keyed_choices_depend_on_nothing_else() {
        let docs = docs(&["a", "b", "c", "d", "e", "f"]);
        let sampler = Sampler { docs: &docs, is_first_n: false, leaves_out: true };
        let mut draws = Draws::Keyed { seed: 1234, task: "t" };
        let forward: Vec<_> = (0..6).map(|i| names(&sampler.sample(&mut draws, 3, i, &docs[i]).unwrap())).collect();
        for i in (0..6).rev() {
            let mut draws = Draws::Keyed { seed: 1234, task: "t" };
            let chosen = names(&sampler.sample(&mut draws, 3, i, &docs[i]).unwrap());
            assert_eq!(chosen, forward[i]);
            assert!(!chosen.contains(&docs[i]["q"].as_str().unwrap().to_owned()));
        }
        assert!((1..6).any(|i| forward[i] != forward[0]));
    }

    #[test]
    fn a_document_that_comes_twice_is_left_out_twice() {
        let docs = docs(&["a", "a", "b"]);
        let sampler = Sampler { docs: &docs, is_first_n: false, leaves_out: true };
        let mut draws = Draws::Stream(Box::new(Random::new(0)));
        for _ in 0..5 {
            assert_eq!(names(&sampler.sample(&mut draws, 1, 0, &docs[0]).unwrap()), ["b"]);
        }
        assert!(sampler.sample(&mut draws, 3, 0, &docs[0]).unwrap_err().contains("only 3"));
    }

    #[test]
    fn the_first_are_taken_in_order() {
        let docs = docs(&["a", "b", "c"]);
        let sampler = Sampler { docs: &docs, is_first_n: true, leaves_out: true };
        let mut draws = Draws::Keyed { seed: 0, task: "t" };
        assert_eq!(names(&sampler.sample(&mut draws, 2, 0, &docs[0]).unwrap()), ["b", "c"]);
    }
}
