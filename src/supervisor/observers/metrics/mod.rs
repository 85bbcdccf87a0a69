//! Metrics of the run for Prometheus.

mod exporter;
mod http;
mod prometheus_text;
#[cfg(test)]
mod tests;

pub(crate) use exporter::Metrics;
