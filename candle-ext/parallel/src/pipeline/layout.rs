//! Which stage of a pipeline has which units of a model.

use std::ops::Range;

/// The blocks of a model in runs, one after another. A stage has one run, or several: with s stages those of number i, i + s,
/// i + 2s and so on (interleaved, as Megatron-LM does). The embedding goes with the first run, the head with the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineLayout {
    n_stages: usize,
    /// Where each run ends.
    ends: Vec<usize>,
}

impl PipelineLayout {
    /// One stage with `n_blocks` blocks.
    pub fn whole(n_blocks: usize) -> Self {
        Self { n_stages: 1, ends: vec![n_blocks] }
    }

    /// `n_stages` stages whose runs have so many blocks; as many runs for each stage.
    pub fn new(n_stages: usize, blocks: &[usize]) -> Self {
        assert!(
            n_stages > 0 && !blocks.is_empty() && blocks.len().is_multiple_of(n_stages),
            "every stage has its runs"
        );
        let sum = |end: &mut usize, n: &usize| {
            *end += n;
            Some(*end)
        };
        Self { n_stages, ends: blocks.iter().scan(0, sum).collect() }
    }

    /// Shares `n_blocks` blocks out among `n_stages` times `n_chunks` runs, so that the longest run takes the least time, the
    /// last one's including the head, which takes as long as `head` blocks. Each run gets at least one block if there are as
    /// many.
    pub fn balanced(n_blocks: usize, n_stages: usize, n_chunks: usize, head: f64) -> Self {
        let n_runs = n_stages * n_chunks;
        let least = usize::from(n_blocks >= n_runs);
        let mut blocks = vec![least; n_runs];
        // The next block goes where it makes the least of a difference: to the shortest run, the first of several.
        for _ in least * n_runs..n_blocks {
            let time = |run: usize| blocks[run] as f64 + if run + 1 == n_runs { head } else { 0.0 };
            let shortest = (0..n_runs).min_by(|a, b| time(*a).total_cmp(&time(*b)));
            blocks[shortest.unwrap_or(0)] += 1;
        }
        Self::new(n_stages, &blocks)
    }

    /// Returns the number of stages.
    pub fn n_stages(&self) -> usize {
        self.n_stages
    }

    /// Returns the number of runs that each stage has.
    pub fn n_chunks(&self) -> usize {
        self.ends.len() / self.n_stages
    }

    /// Returns the number of blocks.
    pub fn n_blocks(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the blocks of a stage's run.
    pub fn blocks(&self, stage: usize, chunk: usize) -> Range<usize> {
        let run = self.run(stage, chunk);
        let start = run.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[run]
    }

    /// Tells whether a run begins with the embedding.
    pub fn is_first(&self, stage: usize, chunk: usize) -> bool {
        self.run(stage, chunk) == 0
    }

    /// Tells whether a run ends with the head.
    pub fn is_last(&self, stage: usize, chunk: usize) -> bool {
        self.run(stage, chunk) + 1 == self.ends.len()
    }

    /// Returns the stage that has a unit: 0 is the embedding, then come the blocks and the head.
    pub fn stage_of(&self, unit_idx: usize) -> usize {
        let run = match unit_idx.checked_sub(1) {
            None => 0,
            Some(block_idx) => self.ends.partition_point(|end| *end <= block_idx).min(self.ends.len() - 1),
        };
        run % self.n_stages
    }

    fn run(&self, stage: usize, chunk: usize) -> usize {
        chunk * self.n_stages + stage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_with_the_stage_whose_run_has_it() {
        for layout in [
            PipelineLayout::whole(5),
            PipelineLayout::new(2, &[3, 2]),
            PipelineLayout::new(3, &[2, 0, 1]),
            PipelineLayout::new(2, &[1, 2, 2, 1]),
            PipelineLayout::balanced(30, 4, 2, 3.5),
        ] {
            let mut seen = Vec::new();
            for chunk in 0..layout.n_chunks() {
                for stage in 0..layout.n_stages() {
                    for block in layout.blocks(stage, chunk) {
                        assert_eq!(layout.stage_of(block + 1), stage, "{layout:?}, block {block}");
                        seen.push(block);
                    }
                }
            }
            assert_eq!(seen, (0..layout.n_blocks()).collect::<Vec<_>>(), "{layout:?}");
            assert_eq!(layout.stage_of(0), 0);
            assert_eq!(layout.stage_of(layout.n_blocks() + 1), layout.n_stages() - 1);
            assert!(layout.is_first(0, 0) && layout.is_last(layout.n_stages() - 1, layout.n_chunks() - 1));
        }
    }

    #[test]
    fn the_stage_with_the_head_has_fewer_blocks() {
        assert_eq!(PipelineLayout::balanced(8, 2, 1, 0.0), PipelineLayout::new(2, &[4, 4]));
        assert_eq!(PipelineLayout::balanced(8, 2, 1, 2.0), PipelineLayout::new(2, &[5, 3]));
        assert_eq!(PipelineLayout::balanced(8, 2, 1, 100.0), PipelineLayout::new(2, &[7, 1]));
        assert_eq!(PipelineLayout::balanced(1, 2, 1, 0.0), PipelineLayout::new(2, &[1, 0]));
    }
}
