// What a CPU build of PyTorch lacks to carry tensors that say they are on cuda:0 through autograd: a device guard and
// hooks, which do nothing, and an accelerator for the streams of the backward. The file is loaded by LD_PRELOAD, so that
// getAccelerator here is found before PyTorch's own.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device device{c10::DeviceType::CUDA, 0};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at {
using CUDAHooks = ::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace at::accelerator {

__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}

}  // namespace at::accelerator
