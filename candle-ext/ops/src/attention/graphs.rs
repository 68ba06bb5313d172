//! Cache of cuDNN graphs by shape, including the shapes that cuDNN refused.

use std::collections::HashMap;
use std::hash::Hash;

type Explained<T> = std::result::Result<T, String>;

/// Graphs by shape. A refusal is kept as long as the process lives.
pub(super) struct Graphs<S, G>(HashMap<S, Explained<G>>);

impl<S: Copy + Eq + Hash, G: Copy> Graphs<S, G> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    /// Returns the graph of a shape, built on first use, or the reason why it has none. A new reason is logged.
    pub(super) fn get_or_build(&mut self, shape: S, build: impl FnOnce() -> Explained<G>) -> Explained<G> {
        if let Some(known) = self.0.get(&shape) {
            return known.clone();
        }
        let built = build();
        if let Err(why) = &built
            && !self.0.values().any(|known| known.as_ref().err() == Some(why))
        {
            let why = why.lines().next().unwrap_or_default();
            tracing::warn!("cuDNN does not compute this attention: {why}");
        }
        self.0.insert(shape, built.clone());
        built
    }

    /// Runs the graph of a shape unless an earlier run was refused. A refusal is logged once and remembered.
    pub(super) fn run(&mut self, shape: S, run: impl FnOnce() -> Explained<()>) -> Explained<()> {
        if let Some(Err(why)) = self.0.get(&shape) {
            return Err(why.clone());
        }
        run().inspect_err(|why| {
            tracing::warn!("cuDNN refuses attention when it runs: {why}");
            self.0.insert(shape, Err(why.clone()));
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_graph_is_built_once_for_each_shape_and_a_refusal_stays() {
        let mut graphs = Graphs::new();
        assert_eq!(graphs.get_or_build(1, || Ok('a')), Ok('a'));
        assert_eq!(graphs.get_or_build(1, || panic!("it is there")), Ok('a'));
        assert_eq!(graphs.get_or_build(2, || Err("no".into())), Err("no".into()));
        assert_eq!(graphs.get_or_build(2, || panic!("it was refused")), Err("no".into()));
    }

    #[test]
    fn a_shape_that_is_refused_when_it_runs_is_neither_built_nor_run_again() {
        let mut graphs = Graphs::new();
        assert_eq!(graphs.get_or_build(1, || Ok('a')), Ok('a'));
        assert_eq!(graphs.run(1, || Ok(())), Ok(()));
        assert_eq!(graphs.run(1, || Err("NVRTC is missing".into())), Err("NVRTC is missing".into()));
        assert_eq!(graphs.run(1, || panic!("it was refused")), Err("NVRTC is missing".into()));
        assert_eq!(graphs.get_or_build(1, || panic!("it was refused")), Err("NVRTC is missing".into()));
        // Other shapes are unaffected.
        assert_eq!(graphs.get_or_build(2, || Ok('b')), Ok('b'));
        assert_eq!(graphs.run(2, || Ok(())), Ok(()));
    }
}
