//! RoPE tables: cosines and sines in f32, bit-identical to torch's.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};
use candlewick_ops::{Weight, embedding, upload};

use crate::{Config, config::RopeKind};

/// Returns the inverse frequencies, one for each rotated pair of a head's dimensions.
fn inverse_frequencies(config: &Config) -> Vec<f32> {
    let typed = &config.typed;
    let frequency = |pair: usize| {
        let exponent = (2 * pair) as f32 / typed.rotary_dim as f32;
        let frequency = 1.0 / (typed.rope_theta.powf(f64::from(exponent)) as f32);
        scaled(&typed.rope, frequency)
    };
    (0..typed.rotary_dim / 2).map(frequency).collect()
}

/// Returns the factors that divide the inverse frequencies, [r/2], for Llama 3.1's scaling; `None` for other kinds.
pub(crate) fn frequency_factors(config: &Config) -> Option<Vec<f32>> {
    let RopeKind::Llama3 { .. } = config.typed.rope else { return None };
    let mut unscaled = config.clone();
    unscaled.typed.rope = RopeKind::Default;
    let pairs = inverse_frequencies(&unscaled).into_iter().zip(inverse_frequencies(config));
    Some(pairs.map(|(unscaled, scaled)| unscaled / scaled).collect())
}

fn scaled(kind: &RopeKind, frequency: f32) -> f32 {
    match *kind {
        RopeKind::Default => frequency,
        RopeKind::Linear { factor } => frequency / factor as f32,
        RopeKind::Llama3 { factor, low, high, original_positions } => {
            let wavelength = std::f32::consts::TAU / frequency;
            let slowed = frequency / factor as f32;
            if wavelength > (original_positions / low) as f32 {
                return slowed;
            }
            if wavelength < (original_positions / high) as f32 {
                return frequency;
            }
            let smooth = (original_positions as f32 / wavelength - low as f32) / (high - low) as f32;
            (1.0 - smooth) * slowed + smooth * frequency
        }
    }
}

/// RoPE tables of a model. They are cached on the device and extended when a longer position occurs.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    frequencies: Vec<f32>,
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
        Self { frequencies: inverse_frequencies(config), known: Arc::default() }
    }

    /// Returns the cosines and sines at `positions`, f32 [t, r/2] each for r rotated elements of a head.
    pub(crate) fn at(&self, positions: &[u32], device: &Device) -> Result<(Tensor, Tensor)> {
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
        let tables = compute(&self.frequencies, n_positions.next_power_of_two(), device)?;
        *known = Some(tables.clone());
        Ok(tables)
    }
}

fn compute(frequencies: &[f32], n_positions: usize, device: &Device) -> Result<Tables> {
    let angles = || (0..n_positions).flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
    let shape = (n_positions, frequencies.len());
    let cos: Vec<f32> = angles().map(|angle| angle.cos() as f32).collect();
    let sin: Vec<f32> = angles().map(|angle| angle.sin() as f32).collect();
    Ok(Tables { cos: Tensor::from_vec(cos, shape, device)?, sin: Tensor::from_vec(sin, shape, device)? })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const LLAMA3: RopeKind = RopeKind::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 8192.0 };

    #[test]
    fn llama3_keeps_short_waves_and_slows_long_ones() {
        assert_eq!(scaled(&LLAMA3, 1.0), 1.0);
        assert_eq!(scaled(&LLAMA3, 1e-5), 1e-5 / 8.0);
        let between = scaled(&LLAMA3, 1.5e-3);
        assert!(between > 1.5e-3 / 8.0 && between < 1.5e-3, "{between}");
    }

    fn rope() -> Rope {
        Rope { frequencies: vec![1.0, 0.1], known: Arc::default() }
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
        let rows =
            |rope: &Rope, positions: &[u32]| rope.at(positions, &Device::Cpu).unwrap().0.to_vec2::<f32>().unwrap();
        let warm = rope();
        for positions in [&[2, 0, 1][..], &[9], &[0, 1, 0, 1, 300], &[5], &[]] {
            assert_eq!(rows(&warm, positions), rows(&rope(), positions), "{positions:?}");
        }
    }
}
