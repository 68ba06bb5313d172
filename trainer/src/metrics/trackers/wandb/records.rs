//! Messages of a `.wandb` file: the used fields of `wandb/proto/wandb_internal.proto`.

use prost::Message;

/// `Record`. Exactly one of the optional fields is set: a `oneof` in the schema.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbRecord {
    /// The number of the record in the file, from 1.
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
    #[prost(message, optional, tag = "2")]
    pub(super) history: Option<WandbHistory>,
    #[prost(message, optional, tag = "3")]
    pub(super) summary: Option<WandbItems>,
    #[prost(message, optional, tag = "17")]
    pub(super) run: Option<WandbRunRecord>,
    #[prost(message, optional, tag = "18")]
    pub(super) exit: Option<WandbExit>,
    #[prost(message, optional, tag = "21")]
    pub(super) header: Option<WandbHeader>,
    #[prost(message, optional, tag = "22")]
    pub(super) footer: Option<WandbFooter>,
    #[prost(message, optional, tag = "23")]
    pub(super) preempting: Option<WandbPreempting>,
}

/// `HistoryRecord`: the metrics of a step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbHistory {
    #[prost(message, repeated, tag = "1")]
    pub(super) item: Vec<WandbItem>,
    #[prost(message, optional, tag = "2")]
    pub(super) step: Option<WandbStep>,
}

/// `HistoryStep`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbStep {
    #[prost(int64, tag = "1")]
    pub(super) num: i64,
}

/// `SummaryRecord` and `ConfigRecord`: updated items.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbItems {
    #[prost(message, repeated, tag = "1")]
    pub(super) update: Vec<WandbItem>,
}

/// `HistoryItem`, `SummaryItem` and `ConfigItem`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbItem {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    #[prost(string, tag = "16")]
    pub(super) value_json: String,
}

/// `RunRecord`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbRunRecord {
    #[prost(string, tag = "1")]
    pub(super) run_id: String,
    #[prost(string, tag = "2")]
    pub(super) entity: String,
    #[prost(string, tag = "3")]
    pub(super) project: String,
    #[prost(message, optional, tag = "4")]
    pub(super) config: Option<WandbItems>,
    #[prost(string, tag = "6")]
    pub(super) run_group: String,
    #[prost(string, tag = "7")]
    pub(super) job_type: String,
    #[prost(string, tag = "8")]
    pub(super) display_name: String,
    #[prost(string, tag = "9")]
    pub(super) notes: String,
    #[prost(string, repeated, tag = "10")]
    pub(super) tags: Vec<String>,
    #[prost(string, tag = "13")]
    pub(super) host: String,
    #[prost(message, optional, tag = "17")]
    pub(super) start_time: Option<WandbTimestamp>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbTimestamp {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
    #[prost(int32, tag = "2")]
    pub(super) nanos: i32,
}

/// `RunExitRecord`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbExit {
    #[prost(int32, tag = "1")]
    pub(super) exit_code: i32,
    /// Seconds.
    #[prost(int32, tag = "2")]
    pub(super) runtime: i32,
}

/// `HeaderRecord`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbHeader {
    #[prost(message, optional, tag = "1")]
    pub(super) version_info: Option<WandbVersionInfo>,
}

/// `VersionInfo`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbVersionInfo {
    #[prost(string, tag = "1")]
    pub(super) producer: String,
    /// The lowest version of the server.
    #[prost(string, tag = "2")]
    pub(super) min_consumer: String,
}

/// `FooterRecord`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbFooter {}

/// `RunPreemptingRecord`: the run ends to be resumed later.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WandbPreempting {}
