# Builds lessor and leaves nothing in the image but the binary, libc and the system's trust roots.
FROM rust:1.95-bookworm AS builder
WORKDIR /src
COPY . .
RUN cargo build --release --locked --bin lessor

FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=builder /src/target/release/lessor /usr/local/bin/lessor
# By number, so that Kubernetes can see that it is not root.
USER 65532:65532
ENV XDG_RUNTIME_DIR=/tmp
EXPOSE 8321 8322
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s CMD ["/usr/local/bin/lessor", "ready"]
ENTRYPOINT ["/usr/local/bin/lessor"]
CMD ["run"]
