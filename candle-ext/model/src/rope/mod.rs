//! RoPE tables: cosines and sines in f32, bit-identical to torch's.
//!
//! `dynamic` and `longrope` choose frequencies by the length of a sequence ([`LengthClass`]).

mod frequencies;

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor, bail};
use candlewick_ops::{Weight, embedding, upload};

use crate::{
    Config,
    config::{RopeKind, Typed},
};
use frequencies::{Rotation, rotation};

pub use frequencies::LengthClass;

/// Returns the factors that divide the inverse frequencies, [r/2], for Llama 3.1's scaling; `None` for other kinds.
pub(crate) fn frequency_factors(config: &Config) -> Option<Vec<f32>> {
    let RopeKind::Llama3 { .. } = config.typed.rope else { return None };
    let unscaled = Typed { rope: RopeKind::Default, ..config.typed.clone() };
    let of = |typed: &Typed| rotation(typed, LengthClass::Short).frequencies;
    let pairs = of(&unscaled).into_iter().zip(of(&config.typed));
    Some(pairs.map(|(unscaled, scaled)| unscaled / scaled).collect())
}

/// RoPE tables of a model. They are cached on the device and extended when a longer position occurs.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    typed: Arc<Typed>,
    short: CachedTables,
    /// Tables of LongRoPE above the original context; unused otherwise.
    long: CachedTables,
}

/// Tables of one rotation.
#[derive(Clone, Debug)]
struct CachedTables {
    rotation: Arc<Rotation>,
    known: Arc<Mutex<Option<Tables>>>,
}

/// Cosines and sines, f32 [positions, r/2] each.
#[derive(Clone, Debug)]
struct Tables {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    pub(crate) fn new(config: &Config) -> Self {
        let typed = &config.typed;
        let cached = |class| CachedTables { rotation: Arc::new(rotation(typed, class)), known: Arc::default() };
        Self { typed: Arc::new(typed.clone()), short: cached(LengthClass::Short), long: cached(LengthClass::Long) }
    }

    /// Returns the frequencies of a sequence of `n_tokens`.
    pub(crate) fn class(&self, n_tokens: u32) -> LengthClass {
        LengthClass::of(&self.typed.rope, n_tokens)
    }

    /// Returns the frequencies of each token of packed sequences.
    pub(crate) fn classes(&self, positions: &[u32]) -> Vec<LengthClass> {
        sequence_lengths(positions).into_iter().map(|n_tokens| self.class(n_tokens)).collect()
    }

    /// Returns the cosines and sines at `positions` of sequences with these classes, f32 [t, r/2] each for r rotated elements
    /// of a head.
    pub(crate) fn at(&self, positions: &[u32], classes: &[LengthClass], device: &Device) -> Result<(Tensor, Tensor)> {
        self.by_runs(positions, classes, device, |class, positions| match class {
            LengthClass::Short => self.short.at(positions, device),
            LengthClass::Long => self.long.at(positions, device),
            LengthClass::Dynamic { .. } => self.computed(class, positions, device),
        })
    }

    /// Returns what [`Self::at`] does, without tables of all positions up to the last.
    pub(crate) fn computed_at(
        &self,
        positions: &[u32],
        classes: &[LengthClass],
        device: &Device,
    ) -> Result<(Tensor, Tensor)> {
        self.by_runs(positions, classes, device, |class, positions| self.computed(class, positions, device))
    }

    /// Joins the rows that `of_class` returns for each run of positions with one class.
    fn by_runs(
        &self,
        positions: &[u32],
        classes: &[LengthClass],
        device: &Device,
        of_class: impl Fn(LengthClass, &[u32]) -> Result<(Tensor, Tensor)>,
    ) -> Result<(Tensor, Tensor)> {
        if classes.len() != positions.len() {
            bail!("rope: {} classes of lengths for {} positions", classes.len(), positions.len())
        }
        let mut start = 0;
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for run in classes.chunk_by(|a, b| a == b) {
            let rows = of_class(run[0], &positions[start..start + run.len()])?;
            cos.push(rows.0);
            sin.push(rows.1);
            start += run.len();
        }
        match cos.len() {
            0 => self.short.at(positions, device),
            1 => Ok((cos.swap_remove(0), sin.swap_remove(0))),
            _ => Ok((Tensor::cat(&cos, 0)?, Tensor::cat(&sin, 0)?)),
        }
    }

    fn computed(&self, class: LengthClass, positions: &[u32], device: &Device) -> Result<(Tensor, Tensor)> {
        let Tables { cos, sin } = compute(&rotation(&self.typed, class), positions.iter().copied(), device)?;
        Ok((cos, sin))
    }
}

impl CachedTables {
    fn at(&self, positions: &[u32], device: &Device) -> Result<(Tensor, Tensor)> {
        let n_positions = positions.iter().max().map_or(0, |last| *last as usize + 1);
        let tables = self.tables(n_positions, device)?;
        let positions = upload(positions, positions.len(), device)?;
        let of_positions = |table: Tensor| embedding(&positions, &Weight::frozen(table), None);
        Ok((of_positions(tables.cos)?, of_positions(tables.sin)?))
    }

    fn tables(&self, n_positions: usize, device: &Device) -> Result<Tables> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tables) = known.as_ref()
            && tables.cos.dim(0)? >= n_positions
            && tables.cos.device().same_device(device)
        {
            return Ok(tables.clone());
        }
        // Doubling the table keeps the cost of decoding linear in the number of tokens.
        let tables = compute(&self.rotation, 0..n_positions.next_power_of_two() as u32, device)?;
        *known = Some(tables.clone());
        Ok(tables)
    }
}

/// Returns the length of each token's sequence, from positions that begin at 0 in each sequence.
fn sequence_lengths(positions: &[u32]) -> Vec<u32> {
    let mut lengths = vec![0; positions.len()];
    let mut n_tokens = 0;
    for (i, position) in positions.iter().enumerate().rev() {
        n_tokens = n_tokens.max(position + 1);
        lengths[i] = n_tokens;
        if *position == 0 {
            n_tokens = 0;
        }
    }
    lengths
}

fn compute(rotation: &Rotation, positions: impl Iterator<Item = u32> + Clone, device: &Device) -> Result<Tables> {
    let Rotation { frequencies, attention_factor } = rotation;
    let angles = || positions.clone().flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
    let shape = (positions.clone().count(), frequencies.len());
    let cos: Vec<f32> = angles().map(|angle| angle.cos() as f32 * attention_factor).collect();
    let sin: Vec<f32> = angles().map(|angle| angle.sin() as f32 * attention_factor).collect();
    Ok(Tables { cos: Tensor::from_vec(cos, shape, device)?, sin: Tensor::from_vec(sin, shape, device)? })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rope() -> CachedTables {
        let rotation = Rotation { frequencies: vec![1.0, 0.1], attention_factor: 1.0 };
        CachedTables { rotation: Arc::new(rotation), known: Arc::default() }
    }

    #[test]
    fn position_zero_leaves_heads_unchanged() {
        let (cos, sin) = rope().at(&[0, 3], &Device::Cpu).unwrap();
        assert_eq!(cos.dims(), [2, 2]);
        assert_eq!(cos.to_vec2::<f32>().unwrap()[0], [1.0, 1.0]);
        assert_eq!(sin.to_vec2::<f32>().unwrap()[0], [0.0, 0.0]);
        assert!((sin.to_vec2::<f32>().unwrap()[1][1] - 0.3_f32.sin()).abs() < 1e-7);
    }

    #[test]
    fn cached_cosines_equal_recomputed_ones() {
        let rows = |rope: &CachedTables, positions: &[u32]| {
            rope.at(positions, &Device::Cpu).unwrap().0.to_vec2::<f32>().unwrap()
        };
        let warm = rope();
        for positions in [&[2, 0, 1][..], &[9], &[0, 1, 0, 1, 300], &[5], &[]] {
            assert_eq!(rows(&warm, positions), rows(&rope(), positions), "{positions:?}");
        }
    }

    #[test]
    fn computed_rows_equal_those_of_tables() {
        let scaling =
            json!({"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "factor": 4});
        let config = json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": scaling,
        });
        let rope = Rope::new(&Config::from_json(config).unwrap());
        let positions = [0, 5, 9, 0, 3, 40];
        let classes = rope.classes(&positions);
        assert_ne!(classes[0], classes[5]);
        let rows = |(cos, sin): (Tensor, Tensor)| [cos, sin].map(|x| x.to_vec2::<f32>().unwrap());
        let computed = rope.computed_at(&positions, &classes, &Device::Cpu).unwrap();
        assert_eq!(rows(computed), rows(rope.at(&positions, &classes, &Device::Cpu).unwrap()));
        assert!(rope.short.known.lock().unwrap().as_ref().unwrap().cos.dim(0).unwrap() == 16);
    }

    #[test]
    fn each_token_has_the_length_of_its_sequence() {
        assert_eq!(sequence_lengths(&[0, 1, 2, 0, 0, 1]), [3, 3, 3, 1, 2, 2]);
        assert_eq!(sequence_lengths(&[]), [0; 0]);
    }
}
