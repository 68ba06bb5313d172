//! Sampling of few-shot examples.
//!
//! By default the choice depends on the seed, the task and the document, so that no number of ranks and no order changes a
//! prompt. lm-eval draws all choices of a task from one stream; `FewshotRng::Stream` reproduces it.

use serde_json::Value as Json;
use sha2::{Digest, Sha256};

use super::builtin::Doc;
use super::python_random::PythonRandom;

/// Sampler of few-shot examples.
pub(crate) struct FewshotSampler<'a> {
    /// Candidate documents.
    pub(crate) docs: &'a [Doc],
    /// True for the sampler `first_n`.
    pub(crate) is_first_n: bool,
    /// True if the evaluated document must be excluded.
    pub(crate) leaves_out: bool,
    /// Row indices in the evaluated split; empty if the examples come from another split.
    pub(crate) rows: &'a [usize],
}

/// Evaluated document whose examples are sampled.
#[derive(Clone, Copy)]
pub(crate) struct EvalDoc<'a> {
    /// Its number.
    pub(crate) doc_id: usize,
    /// Its row in the split.
    pub(crate) row: Option<usize>,
    /// Itself.
    pub(crate) doc: &'a Doc,
}

/// Random stream of few-shot sampling.
pub(crate) enum FewshotRng<'a> {
    /// One stream for all documents, in their order, as in lm-eval.
    Stream(Box<PythonRandom>),
    /// One stream for each document.
    Keyed {
        /// The user's seed.
        seed: u64,
        /// The task's name.
        task: &'a str,
    },
}

impl<'s> FewshotSampler<'s> {
    /// Samples `n` examples for a document.
    pub(crate) fn sample(&self, draws: &mut FewshotRng, n: usize, asking: EvalDoc) -> Result<Vec<&'s Doc>, String> {
        let chosen = match draws {
            _ if self.is_first_n => self.others(asking).take(n).collect(),
            FewshotRng::Stream(random) => self.drawn_from_stream(random, n, asking)?,
            FewshotRng::Keyed { seed, task } => self.drawn(n, asking, &mut keyed(*seed, task, asking.doc_id)),
        };
        enough(n, chosen.len())?;
        Ok(chosen.into_iter().map(|at| &self.docs[at]).collect())
    }

    fn is_own(&self, at: usize, asking: EvalDoc) -> bool {
        let is_row = || asking.row.is_some() && self.rows.get(at).copied() == asking.row;
        self.leaves_out && (is_row() || self.docs[at] == *asking.doc)
    }

    fn others(&self, asking: EvalDoc) -> impl Iterator<Item = usize> {
        (0..self.docs.len()).filter(move |at| !self.is_own(*at, asking))
    }

    /// Draws until there are enough that are different and not the document itself. Where there are hardly enough, they are
    /// drawn from a list of the others.
    fn drawn(&self, n: usize, asking: EvalDoc, random: &mut PythonRandom) -> Vec<usize> {
        let mut drawn: Vec<usize> = Vec::with_capacity(n);
        if self.docs.len() > 2 * n {
            for _ in 0..8 * (n + 8) {
                let at = random.below(self.docs.len());
                if !drawn.contains(&at) && !self.is_own(at, asking) {
                    drawn.push(at);
                }
                if drawn.len() == n {
                    return drawn;
                }
            }
        }
        let others: Vec<usize> = self.others(asking).collect();
        let places = random.sample(others.len(), n.min(others.len())).unwrap_or_default();
        places.into_iter().map(|at| others[at]).collect()
    }

    /// lm-eval draws one more than it needs, and draws anew from the others if the document came more than once.
    fn drawn_from_stream(&self, random: &mut PythonRandom, n: usize, asking: EvalDoc) -> Result<Vec<usize>, String> {
        let pick = |random: &mut PythonRandom, n: usize, n_docs: usize| {
            random.sample(n_docs, n).ok_or_else(|| too_few(n, n_docs))
        };
        if !self.leaves_out {
            return pick(random, n, self.docs.len());
        }
        let mut drawn = pick(random, n + 1, self.docs.len())?;
        drawn.retain(|at| !self.is_own(*at, asking));
        drawn.truncate(n);
        if drawn.len() == n {
            return Ok(drawn);
        }
        let others: Vec<usize> = self.others(asking).collect();
        Ok(pick(random, n, others.len())?.into_iter().map(|at| others[at]).collect())
    }
}

fn enough(n: usize, n_docs: usize) -> Result<(), String> {
    if n <= n_docs { Ok(()) } else { Err(too_few(n, n_docs)) }
}

fn too_few(n: usize, n_docs: usize) -> String {
    format!("{n} examples are wanted, but there are only {n_docs}")
}

/// A stream of its own for a seed, a task and a document.
fn keyed(seed: u64, task: &str, doc_id: usize) -> PythonRandom {
    let hash = Sha256::digest(Json::from(vec![Json::from(seed), task.into(), doc_id.into()]).to_string());
    let words: Vec<u32> =
        hash.chunks_exact(4).map(|bytes| bytes.iter().fold(0, |word, b| word << 8 | u32::from(*b))).collect();
    PythonRandom::from_key(&words)
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

    fn sampler(docs: &[Doc], is_first_n: bool) -> FewshotSampler<'_> {
        FewshotSampler { docs, is_first_n, leaves_out: true, rows: &[] }
    }

    fn asking(docs: &[Doc], doc_id: usize) -> EvalDoc<'_> {
        EvalDoc { doc_id, row: None, doc: &docs[doc_id] }
    }

    #[test]
    fn keyed_choices_depend_on_nothing_else() {
        let docs = docs(&["a", "b", "c", "d", "e", "f", "g", "h"]);
        let sampler = sampler(&docs, false);
        let mut draws = FewshotRng::Keyed { seed: 1234, task: "t" };
        // Of eight documents three are drawn, of seven others six are picked.
        for n in [3, 6] {
            let forward: Vec<_> =
                (0..8).map(|i| names(&sampler.sample(&mut draws, n, asking(&docs, i)).unwrap())).collect();
            for i in (0..8).rev() {
                let mut draws = FewshotRng::Keyed { seed: 1234, task: "t" };
                let mut chosen = names(&sampler.sample(&mut draws, n, asking(&docs, i)).unwrap());
                assert_eq!(chosen, forward[i]);
                assert!(!chosen.contains(&docs[i]["q"].as_str().unwrap().to_owned()));
                chosen.sort();
                chosen.dedup();
                assert_eq!(chosen.len(), n);
            }
            assert!((1..8).any(|i| forward[i] != forward[0]));
        }
    }

    #[test]
    fn all_documents_are_drawn_as_often() {
        let names: Vec<String> = (0..40).map(|i| i.to_string()).collect();
        let docs = docs(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let mut n_drawn = [0; 40];
        for seed in 0..400 {
            let mut draws = FewshotRng::Keyed { seed, task: "t" };
            for doc in sampler(&docs, false).sample(&mut draws, 4, asking(&docs, 0)).unwrap() {
                n_drawn[doc["q"].as_str().unwrap().parse::<usize>().unwrap()] += 1;
            }
        }
        // 1,600 draws of 39 documents: 41 each, with a deviation of 6.
        assert!(n_drawn[0] == 0 && n_drawn[1..].iter().all(|n| (18..65).contains(n)), "{n_drawn:?}");
    }

    #[test]
    fn a_row_is_left_out_also_if_it_is_written_otherwise() {
        let docs = docs(&["a", "b", "c"]);
        let other = self::docs(&["written otherwise"]);
        let sampler = FewshotSampler { rows: &[10, 11, 12], ..sampler(&docs, false) };
        for seed in 0..20 {
            let asking = EvalDoc { doc_id: 0, row: Some(11), doc: &other[0] };
            let mut draws = FewshotRng::Keyed { seed, task: "t" };
            assert!(!names(&sampler.sample(&mut draws, 2, asking).unwrap()).contains(&"b".to_owned()));
        }
    }

    #[test]
    fn a_document_that_comes_twice_is_left_out_twice() {
        let docs = docs(&["a", "a", "b"]);
        for mut draws in [FewshotRng::Stream(Box::new(PythonRandom::new(0))), FewshotRng::Keyed { seed: 0, task: "t" }]
        {
            for _ in 0..5 {
                assert_eq!(names(&sampler(&docs, false).sample(&mut draws, 1, asking(&docs, 0)).unwrap()), ["b"]);
            }
            let error = sampler(&docs, false).sample(&mut draws, 3, asking(&docs, 0)).unwrap_err();
            assert!(error.contains("3 examples are wanted, but there are only") || error.contains("only 3"), "{error}");
        }
    }

    #[test]
    fn the_first_are_taken_in_order() {
        let docs = docs(&["a", "b", "c"]);
        let mut draws = FewshotRng::Keyed { seed: 0, task: "t" };
        assert_eq!(names(&sampler(&docs, true).sample(&mut draws, 2, asking(&docs, 0)).unwrap()), ["b", "c"]);
        assert!(sampler(&docs, true).sample(&mut draws, 3, asking(&docs, 0)).unwrap_err().contains("only 2"));
    }
}
