#include "error.h"

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

Error ErrorOf(const grpc::Status& status) {
  Error error;
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return error;
  for (const auto& detail : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad_request;
    if (detail.UnpackTo(&info)) {
      error.reason = info.reason();
    } else if (detail.UnpackTo(&bad_request)) {
      for (const auto& violation : bad_request.field_violations()) error.fields.push_back(violation.field());
    }
  }
  return error;
}
