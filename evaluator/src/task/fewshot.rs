//! Sampling of few-shot examples.
//!
//! By default the examples depend on the seed, the task and the document only, so prompts are equal for any number of
//! ranks. lm-eval samples all examples of a task from one stream, which `FewshotRng::Stream` reproduces.

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
    pub(crate) exclude_eval_doc: bool,
    /// Row indices in the evaluated split; empty if the examples come from another split.
    pub(crate) rows: &'a [usize],
}

/// Document whose few-shot examples are sampled.
#[derive(Clone, Copy)]
pub(crate) struct EvalDoc<'a> {
    /// Index of the document in its split.
    pub(crate) doc_id: usize,
    /// Row index of the document in the data set.
    pub(crate) row: Option<usize>,
    /// Columns of the document.
    pub(crate) doc: &'a Doc,
}

/// Random stream of few-shot sampling.
pub(crate) enum FewshotRng<'a> {
    /// One stream for all documents, in their order, as in lm-eval.
    Stream(Box<PythonRandom>),
    /// One stream for each document.
    PerDocument {
        /// Seed of few-shot sampling.
        seed: u64,
        /// Name of the task.
        task: &'a str,
    },
}

impl<'s> FewshotSampler<'s> {
    /// Samples `n` examples for a document.
    pub(crate) fn sample(&self, rng: &mut FewshotRng, n: usize, eval_doc: EvalDoc) -> Result<Vec<&'s Doc>, String> {
        let chosen = match rng {
            _ if self.is_first_n => self.other_docs(eval_doc).take(n).collect(),
            FewshotRng::Stream(random) => self.sample_from_stream(random, n, eval_doc)?,
            FewshotRng::PerDocument { seed, task } => {
                self.sample_by_rejection(n, eval_doc, &mut document_rng(*seed, task, eval_doc.doc_id))
            }
        };
        check_pool_size(n, chosen.len())?;
        Ok(chosen.into_iter().map(|at| &self.docs[at]).collect())
    }

    fn is_eval_doc(&self, at: usize, eval_doc: EvalDoc) -> bool {
        let is_row = || eval_doc.row.is_some() && self.rows.get(at).copied() == eval_doc.row;
        self.exclude_eval_doc && (is_row() || self.docs[at] == *eval_doc.doc)
    }

    fn other_docs(&self, eval_doc: EvalDoc) -> impl Iterator<Item = usize> {
        (0..self.docs.len()).filter(move |at| !self.is_eval_doc(*at, eval_doc))
    }

    /// Samples distinct documents other than the evaluated one by rejection. A small pool is sampled without
    /// rejection instead.
    fn sample_by_rejection(&self, n: usize, eval_doc: EvalDoc, random: &mut PythonRandom) -> Vec<usize> {
        let mut drawn: Vec<usize> = Vec::with_capacity(n);
        if self.docs.len() > 2 * n {
            for _ in 0..8 * (n + 8) {
                let at = random.randbelow(self.docs.len());
                if !drawn.contains(&at) && !self.is_eval_doc(at, eval_doc) {
                    drawn.push(at);
                }
                if drawn.len() == n {
                    return drawn;
                }
            }
        }
        let others: Vec<usize> = self.other_docs(eval_doc).collect();
        let places = random.sample(others.len(), n.min(others.len())).unwrap_or_default();
        places.into_iter().map(|at| others[at]).collect()
    }

    /// Samples `n + 1` documents and removes the evaluated one, as lm-eval does. If it occurs more than once, lm-eval
    /// samples again from the others.
    fn sample_from_stream(&self, random: &mut PythonRandom, n: usize, eval_doc: EvalDoc) -> Result<Vec<usize>, String> {
        let pick = |random: &mut PythonRandom, n: usize, n_docs: usize| {
            random.sample(n_docs, n).ok_or_else(|| too_few_examples(n, n_docs))
        };
        if !self.exclude_eval_doc {
            return pick(random, n, self.docs.len());
        }
        let mut drawn = pick(random, n + 1, self.docs.len())?;
        drawn.retain(|at| !self.is_eval_doc(*at, eval_doc));
        drawn.truncate(n);
        if drawn.len() == n {
            return Ok(drawn);
        }
        let others: Vec<usize> = self.other_docs(eval_doc).collect();
        Ok(pick(random, n, others.len())?.into_iter().map(|at| others[at]).collect())
    }
}

fn check_pool_size(n: usize, n_docs: usize) -> Result<(), String> {
    if n <= n_docs { Ok(()) } else { Err(too_few_examples(n, n_docs)) }
}

fn too_few_examples(n: usize, n_docs: usize) -> String {
    format!("{n} few-shot examples are requested, but only {n_docs} documents are available")
}

/// Creates the random stream of a seed, a task and a document.
fn document_rng(seed: u64, task: &str, doc_id: usize) -> PythonRandom {
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
        FewshotSampler { docs, is_first_n, exclude_eval_doc: true, rows: &[] }
    }

    fn eval_doc(docs: &[Doc], doc_id: usize) -> EvalDoc<'_> {
        EvalDoc { doc_id, row: None, doc: &docs[doc_id] }
    }

    #[test]
    fn keyed_choices_depend_on_nothing_else() {
        let docs = docs(&["a", "b", "c", "d", "e", "f", "g", "h"]);
        let sampler = sampler(&docs, false);
        let mut rng = FewshotRng::PerDocument { seed: 1234, task: "t" };
        // With n = 3 the pool of 8 is sampled by rejection, with n = 6 without.
        for n in [3, 6] {
            let forward: Vec<_> =
                (0..8).map(|i| names(&sampler.sample(&mut rng, n, eval_doc(&docs, i)).unwrap())).collect();
            for i in (0..8).rev() {
                let mut rng = FewshotRng::PerDocument { seed: 1234, task: "t" };
                let mut chosen = names(&sampler.sample(&mut rng, n, eval_doc(&docs, i)).unwrap());
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
            let mut rng = FewshotRng::PerDocument { seed, task: "t" };
            for doc in sampler(&docs, false).sample(&mut rng, 4, eval_doc(&docs, 0)).unwrap() {
                n_drawn[doc["q"].as_str().unwrap().parse::<usize>().unwrap()] += 1;
            }
        }
        // 1,600 draws from 39 documents: 41 each on average, with a standard deviation of 6.
        assert!(n_drawn[0] == 0 && n_drawn[1..].iter().all(|n| (18..65).contains(n)), "{n_drawn:?}");
    }

    #[test]
    fn a_row_is_left_out_also_if_it_is_written_otherwise() {
        let docs = docs(&["a", "b", "c"]);
        let other = self::docs(&["written otherwise"]);
        let sampler = FewshotSampler { rows: &[10, 11, 12], ..sampler(&docs, false) };
        for seed in 0..20 {
            let eval_doc = EvalDoc { doc_id: 0, row: Some(11), doc: &other[0] };
            let mut rng = FewshotRng::PerDocument { seed, task: "t" };
            assert!(!names(&sampler.sample(&mut rng, 2, eval_doc).unwrap()).contains(&"b".to_owned()));
        }
    }

    #[test]
    fn a_document_that_comes_twice_is_left_out_twice() {
        let docs = docs(&["a", "a", "b"]);
        for mut rng in
            [FewshotRng::Stream(Box::new(PythonRandom::new(0))), FewshotRng::PerDocument { seed: 0, task: "t" }]
        {
            for _ in 0..5 {
                assert_eq!(names(&sampler(&docs, false).sample(&mut rng, 1, eval_doc(&docs, 0)).unwrap()), ["b"]);
            }
            let error = sampler(&docs, false).sample(&mut rng, 3, eval_doc(&docs, 0)).unwrap_err();
            assert!(error.contains("3 few-shot examples are requested") || error.contains("only 3"), "{error}");
        }
    }

    #[test]
    fn the_first_are_taken_in_order() {
        let docs = docs(&["a", "b", "c"]);
        let mut rng = FewshotRng::PerDocument { seed: 0, task: "t" };
        assert_eq!(names(&sampler(&docs, true).sample(&mut rng, 2, eval_doc(&docs, 0)).unwrap()), ["b", "c"]);
        assert!(sampler(&docs, true).sample(&mut rng, 3, eval_doc(&docs, 0)).unwrap_err().contains("only 2"));
    }
}
