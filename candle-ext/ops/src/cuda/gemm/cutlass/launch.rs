//! Launch of a grouped GEMM by an object.

use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute;
use candle_core::{CudaDevice, DType, Error, Result};

use super::object::{CutlassCall, TileKernel, TileObject, object};
use crate::cuda::gemm::grouped::{GroupedOutput, GroupedProblems, ProblemArrays};
use crate::cuda::{Gpu, Out};

/// Computes a grouped GEMM by CUTLASS; see [`GroupedProblems::run`].
///
/// # Safety
///
/// As for [`GroupedProblems::run`].
pub(in crate::cuda::gemm) unsafe fn run(problems: &GroupedProblems, device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let failed = |error| Error::Msg(format!("experts: CUDA failed before CUTLASS ran: {error}"));
    let object = object(problems.tile).map_err(|why| explained(problems, &why))?;
    // The CUDA runtime library uses the context of the thread.
    stream.context().bind_to_thread().map_err(failed)?;
    let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let n_multiprocessors = stream.context().attribute(count).map_err(failed)?;
    let ProblemArrays { sizes, addresses, strides } = problems.arrays;
    let call = CutlassCall {
        sizes,
        addresses,
        strides,
        workspace: 0,
        stream: stream.cu_stream().cast(),
        n_groups: problems.e as i32,
        n_multiprocessors,
        beta: if problems.adds { 1.0 } else { 0.0 },
    };
    // SAFETY: the caller guarantees valid addresses. The workspace has the size that CUTLASS requires; it is freed in
    // the order of the stream.
    unsafe {
        let workspace_bytes = submit(problems, object, &call)?;
        let workspace = Out::new(Gpu::Device(device), DType::U8, workspace_bytes)?;
        submit(problems, object, &CutlassCall { workspace: workspace.address, ..call })?;
    }
    Ok(())
}

/// Launches the kernel if the call has a workspace. Returns the workspace's size.
///
/// # Safety
///
/// As for [`TileObject::submit`].
unsafe fn submit(problems: &GroupedProblems, object: &TileObject, call: &CutlassCall) -> Result<usize> {
    let kernel = match problems.output {
        GroupedOutput::Y => TileKernel::Y,
        GroupedOutput::X => TileKernel::X,
        GroupedOutput::W if problems.output_dtype == DType::F32 => TileKernel::GradWF32,
        GroupedOutput::W => TileKernel::GradWBf16,
    };
    // SAFETY: the caller's contract.
    unsafe { object.submit(kernel, call) }.map_err(|why| explained(problems, &why))
}

fn explained(problems: &GroupedProblems, why: &str) -> Error {
    Error::Msg(format!("experts: CUTLASS failed: {why}; choose `experts_implementation: fused` ({problems:?})"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::super::object::tests::Objects;
    use super::*;
    use crate::cuda::{DeviceAddress, address};
    use crate::grouped_tile::{GroupedTile, load_cutlass_from};

    /// Groups of x [5, 8], y [5, 16] and w [2 * 16, 8]: three rows and two.
    const SIZES: [usize; 2] = [3, 2];
    const N_IN: usize = 8;
    const N_OUT: usize = 16;

    /// Returns a device of the stand-in for the driver; `None` if the driver is NVIDIA's or missing.
    fn stand_in_device() -> Option<Device> {
        // SAFETY: a driver's library may be loaded by any program; the address of the symbol is not used.
        unsafe {
            let library = libloading::Library::new("libcuda.so.1").ok()?;
            library.get::<*const ()>(b"stand_in_rules").ok()?;
            std::mem::forget(library);
        }
        Device::new_cuda_with_stream(0).ok()
    }

    fn numbers(rows: usize, columns: usize, dtype: DType, device: &Device) -> Tensor {
        let numbers: Vec<f32> = (0..rows * columns).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
        Tensor::from_vec(numbers, (rows, columns), device).unwrap().to_dtype(dtype).unwrap()
    }

    /// Operands x, y and w on a device. The numbers are small integers, so that all sums are exact.
    fn operands(w_dtype: DType, device: &Device) -> [Tensor; 3] {
        let put = |rows, columns, dtype| numbers(rows, columns, dtype, &Device::Cpu).to_device(device).unwrap();
        [put(5, N_IN, DType::BF16), put(5, N_OUT, DType::BF16), put(2 * N_OUT, N_IN, w_dtype)]
    }

    /// Computes an operand of the others by a tile on the stand-in's device.
    fn computed(output: GroupedOutput, adds: bool, w_dtype: DType, device: &Device) -> Tensor {
        let operands = operands(w_dtype, device);
        let at = |tensor: &Tensor| address("cutlass", tensor).unwrap();
        let of_groups = |i: usize, columns: usize| {
            let bytes = (columns * operands[i].dtype().size_in_bytes()) as DeviceAddress;
            let first_row = if i == 2 { N_OUT } else { SIZES[0] } as DeviceAddress;
            Tensor::new(vec![at(&operands[i]) as i64, (at(&operands[i]) + first_row * bytes) as i64], device).unwrap()
        };
        let sizes = SIZES.map(|n| match output {
            GroupedOutput::Y => [n, N_OUT, N_IN],
            GroupedOutput::X => [n, N_IN, N_OUT],
            GroupedOutput::W => [N_OUT, N_IN, n],
        });
        let sizes = Tensor::new(sizes.concat().iter().map(|n| *n as u32).collect::<Vec<_>>(), device).unwrap();
        let addresses = [of_groups(0, N_IN), of_groups(1, N_OUT), of_groups(2, N_IN)];
        let addresses = output.in_order(addresses.each_ref());
        let strides = [N_IN, N_OUT, N_IN].map(|n| Tensor::new(vec![n as i64; 2], device).unwrap());
        let strides = output.in_order(strides.each_ref());
        let arrays = ProblemArrays { sizes: at(&sizes), addresses: addresses.map(at), strides: strides.map(at) };
        let tile = GroupedTile::named(if output == GroupedOutput::W { "dw-128x128" } else { "128x128" }).unwrap();
        let output_dtype = if output == GroupedOutput::W { w_dtype } else { DType::BF16 };
        let problems = GroupedProblems { output, adds, output_dtype, e: 2, tile, arrays };
        // The stand-in's streams are threads, and the tile multiplies on this one.
        device.synchronize().unwrap();
        // SAFETY: the arrays describe the operands.
        unsafe { run(&problems, device.as_cuda_device().unwrap()) }.unwrap();
        let at = [GroupedOutput::X, GroupedOutput::Y, GroupedOutput::W].iter().position(|of| *of == output).unwrap();
        operands[at].to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()
    }

    /// Computes the same on the CPU.
    fn wanted(output: GroupedOutput, adds: bool, w_dtype: DType) -> Tensor {
        let [x, y, w] = operands(w_dtype, &Device::Cpu).map(|operand| operand.to_dtype(DType::F32).unwrap());
        let of_group = |i: usize| {
            let [first, n] = [i * SIZES[0], SIZES[i]];
            let (x, y) = (x.narrow(0, first, n).unwrap(), y.narrow(0, first, n).unwrap());
            let w = w.narrow(0, i * N_OUT, N_OUT).unwrap();
            match output {
                GroupedOutput::Y => x.matmul(&w.t().unwrap()).unwrap(),
                GroupedOutput::X => y.matmul(&w).unwrap(),
                GroupedOutput::W if adds => (w + y.t().unwrap().matmul(&x).unwrap()).unwrap(),
                GroupedOutput::W => y.t().unwrap().matmul(&x).unwrap(),
            }
        };
        let output_dtype = if output == GroupedOutput::W { w_dtype } else { DType::BF16 };
        let both = Tensor::cat(&[of_group(0), of_group(1)], 0).unwrap();
        both.to_dtype(output_dtype).unwrap().to_dtype(DType::F32).unwrap()
    }

    #[test]
    fn every_kernel_of_a_tile_gets_its_operands() {
        let Some(device) = stand_in_device() else {
            eprintln!("skipped: scripts/check-cublas has a stand-in for the driver");
            return;
        };
        let objects = Objects::new("launch");
        for name in ["128x128", "dw-128x128"] {
            let tile = GroupedTile::named(name).unwrap();
            objects.put(tile, &tile.line(), &["-DSTAND_IN_COMPUTE"]);
        }
        load_cutlass_from(&objects.0).unwrap();
        for (output, adds, w_dtype) in [
            (GroupedOutput::Y, false, DType::BF16),
            (GroupedOutput::X, false, DType::BF16),
            (GroupedOutput::W, false, DType::F32),
            (GroupedOutput::W, true, DType::F32),
            (GroupedOutput::W, true, DType::BF16),
        ] {
            let [got, want] = [computed(output, adds, w_dtype, &device), wanted(output, adds, w_dtype)]
                .map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
            assert_eq!(got, want, "{output:?} {adds} {w_dtype:?}");
        }
    }
}
