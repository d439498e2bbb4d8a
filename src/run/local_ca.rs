//! The local CA while lessor runs: its files, and the operator's that it is read from.

use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::RunError;
use crate::config::roots::Roots;
use crate::config::{CaFiles, Config};
use crate::control::admin::CaSeen;
use crate::listen::ca::Authority;
use crate::listen::ca::files::CaPaths;
use crate::listen::ca::operator::{LOOK_EVERY, follow};

/// The local CA, and where its certificate stands.
#[derive(Clone)]
pub(super) struct LocalCa {
    authority: Arc<Authority>,
    paths: Option<CaPaths>,
    /// Up to which turn of the CA the files were current at the start.
    written: Option<u64>,
}

impl LocalCa {
    /// Writes its files: into the directory that was named for them, or it is no start, for whoever reads them there
    /// counts on them; else beside the admin `socket`, under its name. Where those cannot be written, interception
    /// works all the same: `lessor ca print` has the certificate.
    pub(super) fn publish(
        authority: Arc<Authority>,
        config: &Config,
        socket: Option<&Path>,
        roots: Roots,
    ) -> Result<Self, RunError> {
        if let Some(dir) = &config.ca_dir {
            let failed = |cause| RunError::CaDir { dir: dir.clone(), cause };
            let paths = CaPaths::inside(dir).map_err(failed)?;
            let written = Some(paths.write(&authority, roots).map_err(failed)?);
            return Ok(Self { authority, paths: Some(paths), written });
        }
        let paths = socket.map(CaPaths::beside);
        let written = match paths.as_ref().map(|paths| (paths, paths.write(&authority, roots))) {
            Some((_, Ok(turn))) => Some(turn),
            Some((paths, Err(error))) => {
                tracing::warn!(path = %paths.cert.display(), %error, "the CA's files could not be written");
                None
            }
            None => {
                tracing::warn!("without an admin socket there is no place for the CA's files");
                None
            }
        };
        Ok(Self { authority, paths, written })
    }

    /// The certificate's file, where all are there.
    pub(super) fn file(&self) -> Option<&Path> {
        self.paths.as_ref().filter(|paths| paths.are_there()).map(|paths| &*paths.cert)
    }

    /// Keeps the files current, and the CA by an operator's files, until told to stop.
    pub(super) fn keep(&self, operator: Option<&CaFiles>, stop: &CancellationToken) -> Vec<JoinHandle<()>> {
        let files = self
            .paths
            .clone()
            .map(|paths| tokio::spawn(paths.keep(self.authority.clone(), self.written, stop.clone())));
        let operator = operator.map(|files| {
            let following = follow(self.authority.clone(), files.clone(), LOOK_EVERY, stop.clone());
            tokio::spawn(following)
        });
        files.into_iter().chain(operator).collect()
    }

    pub(super) fn seen(&self) -> CaSeen {
        let there = self.paths.as_ref().filter(|paths| paths.are_there());
        CaSeen {
            cert_file: there.map(|paths| paths.cert.display().to_string()),
            bundle_file: there.map(|paths| paths.bundle.display().to_string()),
            java_file: there.map(|paths| paths.java.display().to_string()),
            pem: self.authority.pem(),
        }
    }
}
