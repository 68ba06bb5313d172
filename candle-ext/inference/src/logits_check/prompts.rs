//! Prompts whose logits are compared, and the positions of their tokens.

use std::ops::Range;

/// Prompts, packed one after the other.
pub(super) struct PackedPrompts {
    prompts: Vec<Vec<u32>>,
    /// Positions of all tokens.
    positions: Vec<u32>,
}

/// Largest position of a token. From there, f32 rounds the angles of the fastest pairs by 1e-3, and programs differ.
const MAX_POSITION: usize = (1 << 15) - 1;

impl PackedPrompts {
    /// Creates prompts of a model with `n_positions`. Tokens of every second prompt are next to each other. Those of the others
    /// are further and further apart up to the last position, because most scaling of RoPE shows at long distances alone.
    pub(super) fn new(prompts: Vec<Vec<u32>>, n_positions: usize) -> Self {
        let last = n_positions.saturating_sub(1).min(MAX_POSITION);
        let of_prompt = |(idx, prompt): (usize, &Vec<u32>)| match idx % 2 {
            0 => (0..prompt.len() as u32).collect(),
            _ => spread(prompt.len(), last),
        };
        let positions: Vec<Vec<u32>> = prompts.iter().enumerate().map(of_prompt).collect();
        Self { positions: positions.concat(), prompts }
    }

    pub(super) fn ids(&self) -> Vec<u32> {
        self.prompts.concat()
    }

    pub(super) fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Returns the indices of each prompt's tokens.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.prompts.iter().scan(0, |start, prompt| {
            let range = *start..*start + prompt.len();
            *start = range.end;
            Some(range)
        })
    }

    /// Returns the starts of the prompts, and the number of tokens.
    pub(super) fn starts(&self) -> Vec<usize> {
        [0].into_iter().chain(self.ranges().map(|range| range.end)).collect()
    }
}

/// Returns `n` increasing positions from 0 to `last`, with distances that grow geometrically.
fn spread(n: usize, last: usize) -> Vec<u32> {
    let n_gaps = n.saturating_sub(1).max(1);
    let n_skipped = last.saturating_sub(n_gaps) as f64;
    (0..n).map(|i| i as u32 + ((n_skipped + 1.0).powf(i as f64 / n_gaps as f64) - 1.0).round() as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_increase_to_the_last() {
        assert_eq!(spread(5, 84), [0, 3, 10, 29, 84]);
        assert_eq!(spread(3, 2), [0, 1, 2]);
        assert_eq!((spread(1, 9), spread(0, 9)), (vec![0], vec![]));
        let prompts = PackedPrompts::new(vec![vec![7; 12]; 2], 1 << 20);
        assert!(prompts.positions()[..12].iter().copied().eq(0..12));
        assert!(prompts.positions()[12..].is_sorted_by(|a, b| a < b));
        assert_eq!(prompts.positions()[23], MAX_POSITION as u32);
    }
}
