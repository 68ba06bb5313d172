mod grouped_linear;

use candle_core::{DType, Device, Tensor};

use crate::cases::{Case, TestDevice, check_each};

/// Devices with a kernel of every op of this folder.
pub(crate) fn devices() -> Vec<TestDevice> {
    vec![TestDevice::Cpu]
}

pub(crate) fn check_all_dtypes(case: &Case<'_>) {
    check_each([DType::F32, DType::BF16, DType::F16], |dtype| case.check_on(&devices(), dtype));
}

pub(crate) fn u32s(values: &[u32]) -> Tensor {
    Tensor::new(values, &Device::Cpu).unwrap()
}
