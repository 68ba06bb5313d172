//! Assignment of layers to pipeline stages.

use std::ops::Range;

/// Layers of each pipeline stage, as contiguous model chunks.
///
/// With s stages and interleaving (Megatron-LM's virtual stages), stage i has chunks i, i + s, i + 2s and so on. The
/// first chunk has the embedding, the last one the head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineLayout {
    n_stages: usize,
    /// End of each model chunk, as a layer index.
    ends: Vec<usize>,
}

impl PipelineLayout {
    /// Returns the layout of a single stage with `n_blocks` layers.
    pub fn single_stage(n_blocks: usize) -> Self {
        Self { n_stages: 1, ends: vec![n_blocks] }
    }

    /// Returns the layout of `n_stages` stages. `blocks` has the number of layers of each chunk.
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

    /// Balances `n_blocks` layers over `n_stages` times `n_chunks` model chunks to minimize the longest chunk.
    ///
    /// The head counts as `head` layers. Each chunk gets at least one layer if there are enough.
    pub fn balanced(n_blocks: usize, n_stages: usize, n_chunks: usize, head: f64) -> Self {
        let n_runs = n_stages * n_chunks;
        let least = usize::from(n_blocks >= n_runs);
        let mut blocks = vec![least; n_runs];
        // The next layer goes to the shortest chunk, the first of several.
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

    /// Returns the number of model chunks (virtual stages) of each stage.
    pub fn n_chunks(&self) -> usize {
        self.ends.len() / self.n_stages
    }

    /// Returns the number of layers.
    pub fn n_blocks(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Returns the layers of a model chunk.
    pub fn blocks(&self, stage: usize, chunk: usize) -> Range<usize> {
        let run = self.run(stage, chunk);
        let start = run.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[run]
    }

    /// Returns true if a model chunk has the embedding.
    pub fn is_first(&self, stage: usize, chunk: usize) -> bool {
        self.run(stage, chunk) == 0
    }

    /// Returns true if a model chunk has the head.
    pub fn is_last(&self, stage: usize, chunk: usize) -> bool {
        self.run(stage, chunk) + 1 == self.ends.len()
    }

    /// Returns the stage of a unit: unit 0 is the embedding, then come the layers and the head.
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
            PipelineLayout::single_stage(5),
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
