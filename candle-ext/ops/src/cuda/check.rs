//! Checks of launches against the kernels' declarations. CUDA itself copies arguments by size and checks nothing.

use candle_core::{Result, bail};

use super::arg::Arg;
use super::class::Class;

/// Signature of a kernel in its source.
#[derive(Debug)]
pub(crate) struct Signature {
    pub(crate) name: &'static str,
    /// Most threads per block, from the kernel's launch bounds.
    pub(crate) max_threads: usize,
    pub(crate) parameters: &'static [Class],
}

impl Signature {
    /// Fails unless the kernel accepts these arguments and this number of threads per block.
    pub(super) fn check(&self, op: &str, threads: usize, args: &[Arg]) -> Result<()> {
        let Self { name, max_threads, parameters } = self;
        if threads > *max_threads || threads == 0 || !threads.is_multiple_of(32) {
            bail!(
                "{op}: {name} cannot run {threads} threads a block: its launch bounds are {max_threads}, in warps of 32"
            )
        }
        let classes = || args.iter().map(Arg::class);
        if classes().eq(parameters.iter().copied()) {
            return Ok(());
        }
        let differing = classes().zip(parameters.iter()).position(|(given, wanted)| given != *wanted);
        let n_same = differing.unwrap_or(args.len().min(parameters.len()));
        bail!(
            "{op}: {name} takes {} parameters, {parameters:?}, and the launch passes {}, {:?}: they differ from parameter {} on",
            parameters.len(),
            args.len(),
            classes().collect::<Vec<_>>(),
            n_same + 1
        )
    }
}
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::cuda::{address, gpu, kernels};

    kernels!("rope");

    /// Returns the arguments of the kernel of `rope`, for one token with a head of two elements.
    fn arguments(x: &Tensor, table: &Tensor) -> [Arg; 10] {
        let [x, table] = [x, table].map(|tensor| Arg::Address(address("test", tensor).unwrap()));
        [x, table, table, x, Arg::I32(1), Arg::I32(2), Arg::I32(1), Arg::I64(2), Arg::I64(2), Arg::F32(1.0)]
    }

    /// Launches the kernel of `rope` with modified arguments. Returns x = [3, 4] after the launch, and the error.
    fn launch(name: &str, threads: usize, change: impl FnOnce(&mut Vec<Arg>)) -> (Vec<f32>, Option<String>) {
        let x = Tensor::new(&[3f32, 4.0], &Device::Cpu).unwrap();
        let table = Tensor::new(&[2f32], &Device::Cpu).unwrap();
        let mut args = arguments(&x, &table).to_vec();
        change(&mut args);
        // SAFETY: the kernel has one token of two elements, and tables of one. Wrong arguments must not reach it.
        let result = unsafe { KERNELS.launch(gpu("test", &x).unwrap(), name, [1, 1, 1], threads, &args) };
        (x.to_vec1().unwrap(), result.err().map(|error| error.to_string()))
    }

    #[track_caller]
    fn check_refused(want: &str, change: impl FnOnce(&mut Vec<Arg>)) {
        let (x, error) = launch("rotate_f32", 32, change);
        assert!(error.as_ref().is_some_and(|error| error.contains(want)), "{error:?}");
        assert_eq!(x, [3.0, 4.0], "the kernel has run");
    }

    #[test]
    fn the_declared_arguments_run() {
        assert_eq!(launch("rotate_f32", 32, |_| {}), (vec![-2.0, 14.0], None));
    }

    #[test]
    fn arguments_in_another_order_are_refused() {
        check_refused("they differ from parameter 6 on", |args| args.swap(5, 9));
        check_refused("they differ from parameter 7 on", |args| args.swap(6, 7));
        check_refused("they differ from parameter 4 on", |args| args.swap(3, 4));
    }

    #[test]
    fn arguments_of_another_class_are_refused() {
        check_refused("they differ from parameter 5 on", |args| args[4] = Arg::I64(1));
        check_refused("they differ from parameter 1 on", |args| args[0] = Arg::I64(0));
        check_refused("they differ from parameter 10 on", |args| args[9] = Arg::F64(1.0));
    }

    #[test]
    fn arguments_of_another_number_are_refused() {
        check_refused("passes 6", |args| args.truncate(6));
        check_refused("passes 11", |args| args.push(Arg::I32(0)));
        let declared =
            "takes 10 parameters, [Pointer, Pointer, Pointer, Pointer, Int32, Int32, Int32, Int64, Int64, Float32]";
        check_refused(declared, Vec::clear);
    }

    #[test]
    fn threads_beyond_the_launch_bounds_are_refused() {
        for threads in [512, 0, 33] {
            let error = launch("rotate_f32", threads, |_| {}).1;
            assert!(error.is_some_and(|error| error.contains("its launch bounds are 256")), "{threads}");
        }
    }

    #[test]
    fn a_kernel_that_is_not_declared_is_refused() {
        let error = launch("rotate_f8", 32, |_| {}).1;
        assert!(error.is_some_and(|error| error.contains("there is no kernel rotate_f8 in rope/kernel.cu")));
    }
}
