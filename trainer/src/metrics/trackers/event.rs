//! Messages of TensorBoard's event files: the used fields of `tensorflow/core/util/event.proto` and
//! `tensorflow/core/framework/{summary,tensor}.proto`.

use prost::Message;

/// The version in the first event of a file.
pub(super) const EVENT_FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
pub(super) const SESSION_START: i32 = 1;
/// `DataType.DT_STRING`.
pub(super) const STRING_TENSOR: i32 = 7;

/// `Event`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorBoardEvent {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(string, optional, tag = "3")]
    pub(super) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(super) summary: Option<EventSummary>,
    #[prost(message, optional, tag = "7")]
    pub(super) session_log: Option<SessionLog>,
}

/// `SessionLog`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub(super) status: i32,
}

/// `Summary`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct EventSummary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<SummaryValue>,
}

/// `Summary.Value`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<TensorProto>,
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<SummaryMetadata>,
}

/// `SummaryMetadata`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub(super) plugin_data: Option<PluginData>,
}

/// `SummaryMetadata.PluginData`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub(super) plugin_name: String,
}

/// `TensorProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) tensor_shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub(super) string_val: Vec<Vec<u8>>,
}

/// `TensorShapeProto` of a scalar: no dims.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShape {}
