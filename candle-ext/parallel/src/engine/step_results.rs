//! The numbers of a step: named side outputs in one flat tensor, its layout, and the results of a finished step.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use candlewick_ops::DeviceReadback;

/// Side output of a step, on the host.
#[derive(Clone, Debug, PartialEq)]
pub enum SideOutput {
    /// A number.
    Scalar(f64),
    /// A number of each layer, or of each micro-batch.
    Vector(Vec<f64>),
    /// Numbers of some layers, by layer index.
    Layers(BTreeMap<usize, Vec<f64>>),
}

/// Side outputs of a step by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SideOutputs(BTreeMap<String, SideOutput>);

/// Form of an entry of the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryForm {
    /// One number.
    Scalar,
    /// A number of each layer, or of each micro-batch.
    Vector,
    /// Numbers of a layer.
    OfLayer(usize),
}

/// Named numbers in a flat tensor.
#[derive(Clone, Debug)]
pub(super) struct LayoutEntry {
    name: String,
    form: EntryForm,
    /// Divisor of the sum over all ranks.
    divisor: f64,
    range: Range<usize>,
}

/// Positions of named numbers in a flat tensor. They follow from the numbers that [`FlatOutputs::push`] appends.
#[derive(Clone, Debug, Default)]
pub(super) struct OutputLayout(Vec<LayoutEntry>);

/// Numbers of a step before their reduction.
#[derive(Default)]
pub(super) struct FlatOutputs {
    layout: OutputLayout,
    tensors: Vec<Tensor>,
    n_numbers: usize,
}

/// Copy of several tensors to the host, in flight.
pub(super) struct PartsReadback {
    lengths: Vec<usize>,
    readback: DeviceReadback,
}

impl SideOutput {
    /// Returns the sum over layers.
    pub fn total(&self) -> f64 {
        match self {
            Self::Scalar(value) => *value,
            Self::Vector(values) => values.iter().sum(),
            Self::Layers(layers) => layers.values().flatten().sum(),
        }
    }
}

impl SideOutputs {
    /// Returns an output by name.
    pub fn get(&self, name: &str) -> Option<&SideOutput> {
        self.0.get(name)
    }

    /// Returns the sum over layers of an output.
    pub fn total(&self, name: &str) -> Option<f64> {
        self.get(name).map(SideOutput::total)
    }

    /// Returns the number of each layer or micro-batch; empty for other outputs.
    pub fn vector(&self, name: &str) -> &[f64] {
        match self.get(name) {
            Some(SideOutput::Vector(values)) => values,
            _ => &[],
        }
    }

    /// Returns the numbers of some layers, by layer index; none for other outputs.
    pub fn layers(&self, name: &str) -> impl Iterator<Item = (usize, &[f64])> {
        let layers = match self.get(name) {
            Some(SideOutput::Layers(layers)) => Some(layers),
            _ => None,
        };
        layers.into_iter().flatten().map(|(layer_idx, values)| (*layer_idx, values.as_slice()))
    }

    /// Adds an output, or a layer to it.
    pub(super) fn insert(&mut self, name: &str, form: EntryForm, values: Vec<f64>) {
        let output = match form {
            EntryForm::Scalar => SideOutput::Scalar(values[0]),
            EntryForm::Vector => SideOutput::Vector(values),
            EntryForm::OfLayer(layer_idx) => match self.0.remove(name) {
                Some(SideOutput::Layers(mut layers)) => {
                    layers.insert(layer_idx, values);
                    SideOutput::Layers(layers)
                }
                _ => SideOutput::Layers([(layer_idx, values)].into()),
            },
        };
        self.0.insert(name.to_owned(), output);
    }
}

impl FlatOutputs {
    /// Appends a tensor of numbers, f32.
    pub(super) fn push(&mut self, name: &str, form: EntryForm, divisor: f64, values: Tensor) {
        let range = self.n_numbers..self.n_numbers + values.elem_count();
        self.n_numbers = range.end;
        self.layout.0.push(LayoutEntry { name: name.to_owned(), form, divisor, range });
        self.tensors.push(values);
    }

    /// Returns how many numbers were appended.
    pub(super) fn n_numbers(&self) -> usize {
        self.n_numbers
    }

    /// Returns the layout and the numbers, f32 [n]; `None` without any.
    pub(super) fn finish(self) -> Result<(OutputLayout, Option<Tensor>)> {
        let flat = match self.tensors.is_empty() {
            true => None,
            false => Some(Tensor::cat(&self.tensors, 0)?),
        };
        Ok((self.layout, flat))
    }
}

impl OutputLayout {
    /// Returns the numbers of a layer on the device.
    pub(super) fn of_layer(&self, name: &str, layer_idx: usize, flat: &Tensor) -> Result<Tensor> {
        let is_layer = |entry: &&LayoutEntry| entry.name == name && entry.form == EntryForm::OfLayer(layer_idx);
        let entry = self.0.iter().find(is_layer).expect("the layer has declared the output");
        flat.narrow(0, entry.range.start, entry.range.len())
    }

    /// Returns the numbers of an entry on the host, before the division.
    pub(super) fn numbers<'n>(&self, name: &str, flat: &'n [f32]) -> &'n [f32] {
        let entry = self.0.iter().find(|entry| entry.name == name);
        entry.map_or(&[], |entry| &flat[entry.range.clone()])
    }

    /// Adds the numbers of all entries to `outputs`, each over its divisor.
    pub(super) fn read(&self, flat: &[f32], outputs: &mut SideOutputs) {
        for LayoutEntry { name, form, divisor, range } in &self.0 {
            let values = flat[range.clone()].iter().map(|value| f64::from(*value) / divisor).collect();
            outputs.insert(name, *form, values);
        }
    }
}

impl PartsReadback {
    /// Starts to copy f32 vectors to the host, in one copy. `None` is an empty vector.
    pub(super) fn start<'t>(parts: impl Iterator<Item = Option<&'t Tensor>>) -> Result<Self> {
        let parts: Vec<Option<&Tensor>> = parts.collect();
        let lengths = parts.iter().map(|part| part.map_or(0, Tensor::elem_count)).collect();
        let present: Vec<&Tensor> = parts.into_iter().flatten().collect();
        Ok(Self { lengths, readback: DeviceReadback::start(&Tensor::cat(&present, 0)?)? })
    }

    /// Returns true if [`PartsReadback::wait`] would return immediately.
    pub(super) fn is_ready(&self) -> bool {
        self.readback.is_ready()
    }

    /// Waits for the copy, and returns the vectors.
    pub(super) fn wait(self) -> Result<impl Iterator<Item = Vec<f32>>> {
        let numbers = self.readback.wait()?;
        let mut first = 0;
        Ok(self.lengths.into_iter().map(move |length| {
            first += length;
            numbers[first - length..first].to_vec()
        }))
    }
}

/// Number of units per number of the first of two f32 that carry a count exactly.
const COUNTS_PER_UNIT: f64 = (1 << 20) as f64;

/// Splits a count, an f64 scalar, into two f32 numbers [2] that hold it exactly: units and the rest.
pub(super) fn count_as_f32(count: &Tensor) -> Result<Tensor> {
    let units = (count / COUNTS_PER_UNIT)?.floor()?;
    let rest = (count - (&units * COUNTS_PER_UNIT)?)?;
    Tensor::stack(&[units, rest], 0)?.to_dtype(DType::F32)
}

/// Returns the count that [`count_as_f32`] split.
pub(super) fn count_of(parts: &[f32]) -> Option<f64> {
    match parts {
        [units, rest] => Some(f64::from(*units) * COUNTS_PER_UNIT + f64::from(*rest)),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::new(values, &Device::Cpu).unwrap()
    }

    #[test]
    fn outputs_are_read_at_the_positions_at_which_they_were_pushed() {
        let mut flat = FlatOutputs::default();
        flat.push("loss", EntryForm::Vector, 2.0, tensor(&[2.0, 4.0]));
        flat.push("counts", EntryForm::OfLayer(5), 1.0, tensor(&[7.0, 8.0, 9.0]));
        flat.push("counts", EntryForm::OfLayer(2), 1.0, tensor(&[1.0]));
        flat.push("margin", EntryForm::Scalar, 4.0, tensor(&[2.0]));
        let (layout, numbers) = flat.finish().unwrap();
        let numbers = numbers.unwrap();
        let of_layer = |layer_idx| layout.of_layer("counts", layer_idx, &numbers).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!((of_layer(5), of_layer(2)), (vec![7.0, 8.0, 9.0], vec![1.0]));
        let mut outputs = SideOutputs::default();
        layout.read(&numbers.to_vec1::<f32>().unwrap(), &mut outputs);
        assert_eq!((outputs.vector("loss"), outputs.total("loss")), (&[1.0, 2.0][..], Some(3.0)));
        assert_eq!(outputs.total("margin"), Some(0.5));
        let counts: Vec<_> = outputs.layers("counts").collect();
        assert_eq!(counts, [(2, &[1.0][..]), (5, &[7.0, 8.0, 9.0][..])]);
        assert_eq!((outputs.total("norm"), outputs.vector("counts").len()), (None, 0));
    }

    #[test]
    fn parts_of_one_copy_have_their_lengths() {
        let parts = [tensor(&[1.0, 2.0]), tensor(&[3.0])];
        let parts = [Some(&parts[0]), None, Some(&parts[1])].into_iter();
        let parts = PartsReadback::start(parts).unwrap().wait().unwrap();
        assert_eq!(parts.collect::<Vec<_>>(), [vec![1.0, 2.0], vec![], vec![3.0]]);
    }

    #[test]
    fn two_numbers_hold_a_large_count() {
        for count in [0u64, 5, (1 << 24) + 1, (1 << 43) + 12345] {
            let parts = count_as_f32(&Tensor::new(count as f64, &Device::Cpu).unwrap()).unwrap();
            assert_eq!(count_of(&parts.to_vec1::<f32>().unwrap()), Some(count as f64));
        }
    }
}
